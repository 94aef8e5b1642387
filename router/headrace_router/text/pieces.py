"""How single tokens are shown beside the text: alternatives, prompt tokens, end tokens."""

from __future__ import annotations

from headrace._common.tokenizing import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token by itself; a replacement character stands for part of a character."""
    if token_id in tokenizer.special_ids:
        return tokenizer.text_of(token_id)
    return tokenizer.bytes_of(token_id).decode("utf-8", "replace")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """The bytes of one token."""
    return list(tokenizer.bytes_of(token_id))


def character_count(tokenizer: Tokenizer, token_id: int) -> int:
    """How many characters begin in a token; a special one adds none to a text."""
    if token_id in tokenizer.special_ids:
        return 0
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.bytes_of(token_id))  # continuation bytes begin none


def openai_token(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token as OpenAI's log probabilities show it: `bytes:\\xe2\\x80` for part of a character."""
    data = tokenizer.bytes_of(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
