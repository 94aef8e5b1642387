"""The tokenizer of a model folder, without transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one request = one text; its thread pool would only be in the way

from tokenizers import Tokenizer as _Tokenizer

from headrace._common.detokenizer import TokenBytes
from headrace._common.errors import StartupError


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
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.longest: int = max((len(text) for text in self._tokenizer.get_vocab()), default=1)
        """Characters of the longest token: a text of n characters has at least n / longest tokens."""
        self.bytes_of = TokenBytes(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def pieces(self, text: str, add_special_tokens: bool = True) -> list[Piece]:
        """Tokens of a text with offsets in characters; tokens that share a character share its offsets."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        rows = zip(encoding.ids, encoding.offsets, strict=True)
        return [Piece(i, text[a:b], a, b) for i, (a, b) in rows]

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
