"""Text is never wrong: whatever the tokens and wherever they cut a character, deltas add up to the text, with stop strings
found as a search in the whole text finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Made

from headrace._common.tokenizing import Tokenizer
from headrace_router.text.output import OutputText
from tests.fakes import tokenizers as kinds
from tests.unit.router.test_stops import expected

KINDS: dict[str, Callable[[], Made]] = {
    "byte-level": kinds.byte_level, "byte-fallback": kinds.byte_fallback, "wordpiece": kinds.wordpiece,
}
FRAGMENTS = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd", "e\u0301",
    "o\u0308\u0323", "\u4e16\u754c", "\u65e5\u672c\u8a9e", "\ud55c\uad6d\uc5b4", "\u0627\u0644\u0633\u0644\u0627\u0645",
    "\u202b\u05e9\u05dc\u05d5\u05dd\u202c", "\u0e01\u0e33", "\u0915\u094d\u0937", "\u2581", "<0x41>", "\ufffd", "\ufeff",
    "\u2028", "\x00", "the sky", " ", "END", "\n\n", ". ", "\U0010ffff",
)
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=8).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer"))


def load(made: Made, folder: Path) -> Tokenizer:
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def stream(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = (), keep: bool = True) -> tuple[list[str], bool]:
    """The deltas of an output, and whether a stop string ended it."""
    text, deltas = OutputText(tokenizer, stops, keep), []
    for token_id in ids:
        deltas.append(text.push(token_id))
        if text.stopped:
            break
    deltas.append(text.finish())
    assert "".join(deltas) == text.text
    return deltas, text.stopped


def spell(tokenizer: Tokenizer, text: str, choices: list[int]) -> list[int]:
    """Token ids whose bytes are the text's: at each place, of the tokens that fit there, the one that was drawn."""
    by_bytes = {tokenizer.bytes_of(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    ids: list[int] = []
    data, at = text.encode(), 0
    while at < len(data):
        fits = [size for size in range(1, 32) if data[at : at + size] in by_bytes and at + size <= len(data)]
        size = fits[(choices[len(ids) % len(choices)] if choices else 0) % len(fits)]
        ids.append(by_bytes[data[at : at + size]])
        at += size
    return ids


def test_any_spelling_of_a_text_streams_as_the_text(tokenizer: Tokenizer) -> None:
    if not tokenizer.bytes_of.exact:
        return

    @given(texts, st.lists(st.integers(0, 9), max_size=9))
    def check(text: str, choices: list[int]) -> None:
        deltas, _ = stream(tokenizer, spell(tokenizer, text, choices))
        assert "".join(deltas) == text
        assert deltas[-1] == ""
        assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")

    check()


def test_any_tokens_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    def check(ids: list[int]) -> None:
        deltas, _ = stream(tokenizer, ids)
        if tokenizer.bytes_of.exact:
            whole = b"".join(tokenizer.bytes_of(i) for i in ids if i not in tokenizer.special_ids).decode("utf-8", "replace")
        else:
            whole = tokenizer.decode(ids)
        assert "".join(deltas) == whole
        "".join(deltas).encode()

    check()


def test_stop_strings_as_a_search_finds_them(tokenizer: Tokenizer) -> None:
    pieces = ["sky", "END", "\U0001f600", "\u200d", "e\u0301", "\u0301", "\u754c", "D\n", "' ", "the", "y", "yy"]

    @given(st.data(), st.booleans())
    def check(data: st.DataObject, keep: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
        if tokenizer.bytes_of.exact and data.draw(st.booleans()):
            ids = spell(tokenizer, data.draw(texts), data.draw(st.lists(st.integers(0, 9), max_size=9)))
        whole = "".join(stream(tokenizer, ids)[0])
        cuts = st.integers(0, len(whole)).flatmap(lambda a: st.just(whole[a : a + 1 + a % 5]))
        stops = tuple(filter(None, data.draw(st.lists(st.sampled_from(pieces) | cuts, min_size=1, max_size=4))))
        if not stops:
            return
        deltas, stopped = stream(tokenizer, ids, stops, keep)
        assert ("".join(deltas), stopped) == expected(whole, stops, keep)

    check()


def test_the_tail_is_never_lost(tokenizer: Tokenizer) -> None:
    """A text that ends within a character, or within what may be a stop string."""

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12), st.text(min_size=1, max_size=2))
    def check(ids: list[int], more: str) -> None:
        whole = "".join(stream(tokenizer, ids)[0])
        for size in (1, 3, len(whole)):
            stop = whole[-size:] + more if whole else more
            if stop not in whole:
                assert "".join(stream(tokenizer, ids, (stop,), keep=False)[0]) == whole

    check()


def test_a_clean_up_changes_nothing_that_has_left(tmp_path: Path) -> None:
    tokenizer = load(kinds.wordpiece(), tmp_path)
    ids = [tokenizer.id_of(text) or 0 for text in ("do", "'", "n't", "the", "sk", "##y", "'", "is", ".")]
    deltas, _ = stream(tokenizer, ids)
    assert deltas == ["do", " '", "n't", " the", " sk", "y", " '", " is", ".", ""]
    assert "".join(deltas) == tokenizer.decode(ids)
