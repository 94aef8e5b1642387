"""Token ids to text, step by step: never a broken character, never a lost tail.

Almost every tokenizer maps a token to bytes whatever stands before it, so text is the UTF-8 decoding of the joined
bytes. `TokenBytes` finds those bytes; `Detokenizer` decodes them incrementally.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # the word boundary mark of SentencePiece


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies, as GPT-2 defined it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(others)}}


class TokenBytes:
    """The bytes of each token. `exact` is False where the decoder is of a kind that cannot be told token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._alphabet = byte_alphabet()
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = part_kinds(tokenizer.decoder)
        self._byte_level = "ByteLevel" in kinds
        self._sentencepiece = not self._byte_level and bool(kinds & {"ByteFallback", "Metaspace"})
        self.exact = self._byte_level or self._sentencepiece

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one token; b"" for an id outside the vocabulary."""
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._find(token_id)
        return data

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            if all(c in self._alphabet for c in text):
                return bytes(self._alphabet[c] for c in text)
            return text.encode()
        if self._sentencepiece:
            if match := _BYTE_TOKEN.fullmatch(text):
                return bytes([int(match[1], 16)])
            return text.replace(_SPACE, " ").encode()
        decoded: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return decoded.encode()

    def decode(self, ids: list[int]) -> str:
        """Text of a whole sequence, as the tokenizers library decodes it."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def part_kinds(part: Any) -> set[str]:
    """Kinds of a tokenizer's decoder or normalizer, and of what it is made of; empty if there is none."""
    return {step["type"] for step in part_steps(part)}


def part_steps(part: Any) -> list[dict[str, Any]]:
    """A tokenizer's decoder or normalizer as tokenizer.json writes it, sequences unfolded."""
    return [] if part is None else unfold(json.loads(part.__getstate__()))


def unfold(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A part of a tokenizer.json, and what it is made of."""
    inner = step.get("decoders") or step.get("normalizers") or []
    return [step, *(found for part in inner for found in unfold(part))]


class Detokenizer:
    """The text of one growing sequence of output tokens. Special tokens add no text."""

    __slots__ = ("_ids", "_pending", "_sent", "_special", "_tokenizer")

    def __init__(self, token_bytes: TokenBytes, special_ids: frozenset[int]) -> None:
        self._tokenizer = token_bytes
        self._special = special_ids
        self._pending = b""  # the beginning of a character
        self._ids: list[int] = []  # only where the decoder needs the whole sequence
        self._sent = 0

    def push(self, token_id: int) -> str:
        """The text that became whole with this token; may be ""."""
        if token_id in self._special:
            return ""
        if self._tokenizer.exact:
            data = self._pending + self._tokenizer(token_id)
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            return text
        self._ids.append(token_id)
        whole = self._tokenizer.decode(self._ids)
        return "" if whole.endswith("\ufffd") else self._rest(whole)

    def flush(self) -> str:
        """What is left at the end: a replacement character for bytes that never became one, else ""."""
        if self._tokenizer.exact:
            data, self._pending = self._pending, b""
            return data.decode("utf-8", "replace")
        return self._rest(self._tokenizer.decode(self._ids))

    def _rest(self, whole: str) -> str:
        piece, self._sent = whole[self._sent :], len(whole)
        return piece
