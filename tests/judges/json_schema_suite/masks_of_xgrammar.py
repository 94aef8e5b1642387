"""Runs in the judge's environment: the masks of xgrammar as JSON.

stdin: {"vocabulary": [hex of each token], "end": id, "cases": [{"kind", "source", "prefixes": [[id]]}]}
stdout: [[[allowed id] for each prefix] for each case]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xgrammar


def main() -> None:
    given: dict[str, Any] = json.load(sys.stdin)
    vocabulary = [bytes.fromhex(text) for text in given["vocabulary"]]
    tokens = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[given["end"]]
    )
    compiler = xgrammar.GrammarCompiler(tokens)
    json.dump([masks(compiler, case, len(vocabulary)) for case in given["cases"]], sys.stdout)


def masks(compiler: Any, case: dict[str, Any], size: int) -> list[list[int]]:
    """What may follow each prefix."""
    if case["kind"] == "regex":
        compiled = compiler.compile_regex(case["source"])
    else:
        compiled = compiler.compile_json_schema(case["source"], any_whitespace=True, max_whitespace_cnt=8)
    found = []
    bits = xgrammar.allocate_token_bitmask(1, size)
    for prefix in case["prefixes"]:
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in prefix:
            if not matcher.accept_token(token):
                raise SystemExit(f"{case['source']}: {token} of {prefix} is refused")
        matcher.fill_next_token_bitmask(bits)
        found.append([i for i in range(size) if (int(bits[0, i // 32]) >> (i % 32)) & 1])
    return found


if __name__ == "__main__":
    main()
