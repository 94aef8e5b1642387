"""Prompts of a given length that models do not come to an end of; the same for the same seed."""

from __future__ import annotations

import random

# common English nouns: with a space in front, one token each in the usual BPE vocabularies
_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "moment air teacher force education foot policy music market sense nation plan college interest death experience "
    "effect use class control field development role effort rate heart drug show leader light voice mind price report"
)


def numbered_list(tokens: int, seed: int) -> str:
    """A list of random nouns, about so many tokens long.

    A model goes on with it for hundreds of tokens: answers have their full length also where a server cannot be told to
    go past end tokens. A line is counted as its digits, a full stop, a noun and a line break.
    """
    draw, nouns = random.Random(seed), _NOUNS.split()
    lines, left, number = [], tokens, 1
    while left > 0:
        lines.append(f"{number}. {draw.choice(nouns)}\n")
        left -= len(str(number)) + 3
        number += 1
    return "".join(lines)
