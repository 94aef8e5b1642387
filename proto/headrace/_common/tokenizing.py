"""The tokenizer of a model folder, without transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one request = one text; its thread pool would only be in the way

from tokenizers import Tokenizer as _Tokenizer

from headrace._common.detokenizer import TokenBytes, byte_alphabet, part_steps
from headrace._common.errors import StartupError
from headrace._common.memory import trim_memory

LARGE = 50_000  # characters; tokenizing a text takes some 200 bytes of memory for each


@dataclass(frozen=True)
class Piece:
    """One token of a text, with the characters that it covers: text[start:stop]."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer:
    """Encodes prompts and knows which ids are special. Encoding releases the GIL: call it from a thread pool."""

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json.

        Raises:
            StartupError: the file is not one that the tokenizers library reads.
        """
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise StartupError(f"{path} is not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_texts = {token.content: bool(token.special) for token in added.values()}  # text -> it is special
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.bytes_of = TokenBytes(self._tokenizer)
        self._most_characters, self._dropped = _bound(self._tokenizer, self.bytes_of)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has for sure, found without tokenizing it; often far too small."""
        if not self._most_characters:
            return 0
        kept = len(text) - sum(map(text.count, self._dropped))
        return kept // self._most_characters

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]  # without offsets
        ids: list[int] = encoding.ids
        del encoding
        _give_back(text)
        return ids

    def pieces(self, text: str, add_special_tokens: bool = True) -> list[Piece]:
        """Tokens of a text with offsets in characters; tokens that share a character share its offsets."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        rows = zip(encoding.ids, encoding.offsets, strict=True)
        pieces = [Piece(i, text[a:b], a, b) for i, (a, b) in rows]
        del encoding, rows
        _give_back(text)
        return pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids as the tokenizers library decodes them."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def id_of(self, text: str) -> int | None:
        """The id of the token that is written so, if there is one."""
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    def text_of(self, token_id: int) -> str:
        """How the vocabulary writes a token: a special token's own text, '' for an id outside the vocabulary."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text or ""


def _give_back(text: str) -> None:
    """After a large text: return the free memory of all threads to the system, which malloc would keep for good."""
    if len(text) > LARGE:
        trim_memory()


def _bound(tokenizer: _Tokenizer, bytes_of: TokenBytes) -> tuple[int, str]:
    """(most characters of a text that become one token, characters that become none); (0, "") if there is no bound.

    There is one where every other character becomes tokens of its bytes, and nothing on the way drops or joins characters:
    unknown words that become one token however long they are, white space that is collapsed or swallowed. Byte-level
    vocabularies may lack bytes that hardly occur: a missing ASCII byte drops its character, of a longer character the
    other bytes stay.
    """
    vocab = tokenizer.get_vocab()
    by_byte = {byte: text for text, byte in byte_alphabet().items()}
    missing = [byte for byte in range(256) if by_byte[byte] not in vocab]
    whole_bytes = not any(0x80 <= byte < 0xC0 for byte in missing)
    if len(missing) > 64 or not whole_bytes:  # not a byte-level vocabulary
        missing = []
        whole_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if not (bytes_of.exact and whole_bytes) or swallows:
        return 0, ""
    shrink = 1
    for step in part_steps(tokenizer.normalizer):
        factor = _shrink(step)
        if not factor:
            return 0, ""
        shrink *= factor
    return shrink * max(len(text) for text in vocab), "".join(chr(byte) for byte in missing if byte < 0x80)


def _shrink(step: dict[str, Any]) -> int:
    """Most characters that one step of a normalizer makes one of; 0 if there is no bound."""
    kind = step["type"]
    if kind in ("NFC", "NFKC"):
        return 4  # the longest canonical decomposition of a character (https://unicode.org/faq/normalization.html)
    if kind in ("Sequence", "Prepend", "NFD", "NFKD"):
        return 1
    if kind == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
        return 1
    return 0
