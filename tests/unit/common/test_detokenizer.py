"""Streamed text is what decoding at once gives, whatever the tokens and wherever a character is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace._common.detokenizer import Detokenizer, TokenBytes
from tests.fakes.text_models import make_tokenizer

WORDS = ("\u2581the", "\u2581", "sky", "\u2581is\u2581", "\u00e9", "\u4e16\u754c", "!", "\ufffd")


def sentencepiece(strip: bool = False) -> Tokenizer:
    """Like Llama's: <unk>, an end token, a byte token for each byte, a few words."""
    vocab = {text: i for i, text in enumerate(("<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "</s>")])
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(WORDS)}, merges=[]))
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    return made


def wordpiece() -> Tokenizer:
    """A decoder that joins words with spaces: its text is not the sum of its tokens'."""
    vocab = {text: i for i, text in enumerate(("[UNK]", "the", "sk", "##y", "is", ".", "blue"))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def id_of(tokenizer: Tokenizer, text: str) -> int:
    number = tokenizer.token_to_id(text)
    assert number is not None
    return number


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces of a sequence; the last one is what `flush` gives."""
    detokenizer = Detokenizer(TokenBytes(tokenizer), special_ids(tokenizer))
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def check_whole_characters(pieces: list[str], data: bytes) -> None:
    """No piece ends within a character: what is out is the text of a prefix of the bytes, and stays as it is."""
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces) == whole
    assert whole.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)
    "".join(pieces).encode()  # no half of a surrogate pair


byte_level = make_tokenizer()
llama = sentencepiece()


@given(st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=20))
def test_any_text_of_a_byte_level_tokenizer(text: str) -> None:
    pieces = stream(byte_level, byte_level.encode(text).ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 258 + len(WORDS) - 1), max_size=30))
def test_any_tokens_of_a_sentencepiece_tokenizer(ids: list[int]) -> None:
    data = b""
    for i in ids:
        if i >= 2:
            data += bytes([i - 2]) if i < 258 else WORDS[i - 258].replace("\u2581", " ").encode()
    check_whole_characters(stream(llama, ids), data)
    if b"\xef\xbf\xbd" not in data and "\ufffd" not in data.decode("utf-8", "replace"):  # the library replaces each byte
        assert data.decode() == llama.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=12))
def test_any_characters_as_byte_tokens(text: str) -> None:
    ids = [2 + byte for byte in text.encode()]
    pieces = stream(llama, ids)
    assert "".join(pieces) == text == llama.decode(ids)
    assert pieces[-1] == ""
    ends = [len(text[: n + 1].encode()) - 1 for n in range(len(text))]  # the last byte of each character
    assert pieces[:-1] == [text[ends.index(at)] if at in ends else "" for at in range(len(ids))]


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
def test_any_tokens_of_a_metaspace_tokenizer(ids: list[int]) -> None:
    assert "".join(stream(metaspace(), ids)) == "".join(WORDS[i] for i in ids).replace("\u2581", " ")


@given(st.lists(st.integers(0, 6), max_size=12))
def test_a_decoder_that_needs_the_whole_sequence(ids: list[int]) -> None:
    tokenizer = wordpiece()
    assert not TokenBytes(tokenizer).exact
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_space_at_the_start_stays() -> None:
    """Output goes on from a prompt: the library strips the space only because it takes it for the start of a text."""
    tokenizer = sentencepiece(strip=True)
    ids = [id_of(tokenizer, "\u2581the"), id_of(tokenizer, "sky")]
    assert tokenizer.decode(ids) == "thesky"
    assert stream(tokenizer, ids) == [" the", "sky", ""]


def test_half_a_character_waits_and_comes_as_a_replacement_at_the_end() -> None:
    ids = [2 + byte for byte in "a\U0001f600".encode()]
    assert stream(llama, ids[:-1]) == ["a", "", "", "", "\ufffd"]
    assert stream(llama, ids) == ["a", "", "", "", "\U0001f600", ""]


def test_text_after_half_a_character_is_not_held_back() -> None:
    assert stream(llama, [2 + 0xE2, id_of(llama, "sky")]) == ["", "\ufffdsky", ""]


def test_flush_is_empty_after_whole_characters_and_after_nothing() -> None:
    assert stream(byte_level, []) == [""]
    assert stream(byte_level, byte_level.encode("hello \u00e9").ids)[-1] == ""


def test_special_tokens_add_no_text_and_do_not_break_a_character() -> None:
    first, second = "\u00e9".encode()
    assert stream(llama, [2 + first, 1, 2 + second]) == ["", "", "\u00e9", ""]


@pytest.mark.parametrize("tokenizer", [byte_level, llama, wordpiece()])
def test_an_id_outside_the_vocabulary_is_no_text(tokenizer: Tokenizer) -> None:
    assert TokenBytes(tokenizer)(100_000) == b""
    assert "".join(stream(tokenizer, [100_000])) == ""


def test_an_added_token_is_its_own_text() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("\u00e9t\u00e9", special=False)])  # characters that also stand for bytes
    assert stream(tokenizer, [id_of(tokenizer, "\u00e9t\u00e9")]) == ["\u00e9t\u00e9", ""]
