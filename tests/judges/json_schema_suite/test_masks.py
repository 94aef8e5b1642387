"""After the same tokens, llguidance and xgrammar let the same tokens follow.

Where only one text can follow, llguidance takes the tokens into which the tokenizer cuts it, xgrammar all that fit.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace._common.grammars import Grammar
from headrace._common.tokenizing import Tokenizer
from headrace_shard.grammar.compiler import GrammarCompiler
from headrace_shard.grammar.vocabulary import tokens_of
from headrace_shard.sampling import bits
from tests.judges.json_schema_suite.parts import python

END = 2
WALKS = 6
CASES = [
    ("regex", "(yes|no)(,(yes|no)){3}"), ("regex", "[0-9]{3}-[a-c]+!"), ("regex", "(é|漢|🙂){4}"),
    ("regex", "use 'm' , do n't \\."),
    ("regex", "[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){0,3}"),
    ("json_schema", '{"type":"object","properties":{"a":{"enum":["x","yes"]},"b":{"type":"boolean"}},"required":["a","b"],'
     '"additionalProperties":false}'),
    ("json_schema", '{"type":"array","items":{"enum":["red","green"]},"minItems":2,"maxItems":3}'),
    ("json_schema", '{"anyOf":[{"type":"null"},{"type":"boolean"},{"const":"word"}]}'),
    ("json_schema", '{"type":"object","properties":{"p":{"type":"object","properties":{"q":{"type":"null"}},"required":["q"],'
     '"additionalProperties":false}},"required":["p"],"additionalProperties":false}'),
]


@pytest.mark.judges
def test_both_engines_let_the_same_tokens_follow(embedded_model: Path) -> None:
    tokenizer = Tokenizer(embedded_model / "tokenizer.json")
    tokens = tokens_of((embedded_model / "tokenizer.json").read_text("utf-8"), (END,))
    assert tokens
    compiler = GrammarCompiler(tokens, tokenizer.vocab_size)
    ours: list[list[list[int]]] = []
    cases: list[dict[str, Any]] = []
    for kind, source in CASES:
        prefixes, masks = walks(compiler, Grammar(kind, source))  # type: ignore[arg-type]
        ours.append(masks)
        cases.append({"kind": kind, "source": source, "prefixes": prefixes})
    compiler.close()
    special = tokenizer.special_ids - {END}
    words = [b"" if i in special else tokenizer.bytes_of(i) for i in range(tokenizer.vocab_size)]
    given = json.dumps({"vocabulary": [word.hex() for word in words], "end": END, "cases": cases})
    script = str(Path(__file__).parent / "masks_of_xgrammar.py")
    done = subprocess.run([str(python()), script], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    different = [
        (case["source"], b"".join(words[t] for t in prefix), [words[i] for i in set(a) ^ set(b)][:9])
        for case, left, right in zip(cases, ours, theirs, strict=True)
        for prefix, a, b in zip(case["prefixes"], left, right, strict=True)
        if a != b and not (len(a) == 1 and a[0] in b)
    ]
    assert not different
    assert sum(len(masks) for masks in ours) > 200


def walks(compiler: GrammarCompiler, grammar: Grammar) -> tuple[list[list[int]], list[list[int]]]:
    """Random ways through a grammar: every prefix of them, and what may follow it."""
    prefixes, masks = [], []
    for seed in range(WALKS):
        draw, said = random.Random(seed), list[int]()
        constraint = compiler.start(grammar, [])
        while True:
            compiler.wait([constraint], 10)
            assert not constraint.error
            allowed = bits.tokens_of(constraint.mask).tolist()
            prefixes.append(list(said))
            masks.append(allowed)
            token = draw.choice([i for i in allowed if i != END] or [END])
            if token == END or len(said) > 60:
                break
            said.append(token)
            compiler.advance(constraint, [token])
    return prefixes, masks

