"""From tokens to the text that leaves: whole characters, stop strings, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common.tokenizing import Tokenizer
from headrace_router.text.output import OutputText
from tests.fakes.text_models import EOS_ID, write_text_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_text_model(tmp_path_factory.mktemp("model")) / "tokenizer.json")


def run(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = (), keep: bool = True) -> tuple[list[str], str]:
    text = OutputText(tokenizer, stops, keep)
    pieces = []
    for token_id in ids:
        pieces.append(text.push(token_id))
        if text.stopped:
            break
    pieces.append(text.finish())
    return pieces, text.text


def test_streamed_text_is_the_encoded_text(tokenizer: Tokenizer) -> None:
    @given(st.text(max_size=20))
    def check(text: str) -> None:
        pieces, whole = run(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert "".join(pieces) == whole == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text

    check()


def test_any_tokens_give_valid_text(tokenizer: Tokenizer) -> None:
    @given(st.lists(st.integers(0, 399), max_size=20))
    def check(ids: list[int]) -> None:
        pieces, whole = run(tokenizer, ids)
        data = b"".join(tokenizer.bytes_of(i) for i in ids if i not in tokenizer.special_ids)
        assert "".join(pieces) == whole == data.decode("utf-8", "replace")

    check()


def test_a_stop_string_over_tokens_ends_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the sky is blue and", add_special_tokens=False)
    assert run(tokenizer, ids, ("y is b",))[1] == "the sky is b"
    assert run(tokenizer, ids, ("y is b",), keep=False)[1] == "the sk"


def test_special_tokens_add_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one", add_special_tokens=False), EOS_ID]
    assert run(tokenizer, ids)[1] == "one"


def test_half_a_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600", add_special_tokens=False)
    pieces, whole = run(tokenizer, ids[:-1])
    assert pieces[:-1] == [""] * (len(ids) - 1)
    assert whole == pieces[-1] == "\ufffd"


def test_text_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello EN", add_special_tokens=False)
    pieces, whole = run(tokenizer, ids, ("END",), keep=False)
    assert whole == "hello EN"
    assert pieces[-1] == "EN"


def test_special_tokens_that_are_text(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("hello", add_special_tokens=False)
    text = OutputText(tokenizer, (), True, shown=(1,))
    assert "".join(text.push(i) for i in [*word, 1, 0, *word]) == "hello<|im_start|>hello"
