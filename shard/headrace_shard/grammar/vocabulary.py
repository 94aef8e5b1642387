"""The model's tokens as llguidance needs them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import llguidance

from headrace._common.detokenizer import unfold
from headrace._common.model_folder import ModelFolder, read_json, read_text

DECODERS = {"ByteLevel", "ByteFallback"}  # of which llguidance knows the bytes of each token
log = logging.getLogger(__name__)


def can_constrain(folder: ModelFolder) -> bool:
    """Whether a grammar can rule the model's output: it has end tokens, and a token's text depends on no other."""
    decoder = read_json(folder.tokenizer_path).get("decoder")
    kinds = {step["type"] for step in unfold(decoder)} if decoder else set()
    return bool(folder.eos_token_ids and kinds & DECODERS)


def vocabulary(folder: ModelFolder) -> llguidance.LLTokenizer | None:
    """The tokens of a model that can be constrained, else None; takes some 0.4 s for 50,000 of them.

    Where only one text can follow, llguidance lets only the tokens follow into which the tokenizer cuts it.
    """
    if not can_constrain(folder):
        return None
    return tokens_of(read_text(folder.tokenizer_path), folder.eos_token_ids)


def tokens_of(tokenizer_json: str, eos_ids: Sequence[int]) -> llguidance.LLTokenizer | None:
    """The tokens of a tokenizer; None, with a line in the log, if llguidance does not know its kind."""
    try:
        # End tokens are never text, whatever the tokenizer calls them.
        return llguidance.LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
    except ValueError as error:
        log.warning("grammars are not offered: %s", error)
        return None
