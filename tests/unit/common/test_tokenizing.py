"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from headrace._common.detokenizer import byte_alphabet
from headrace._common.errors import StartupError
from headrace._common.tokenizing import Tokenizer
from tests.fakes.text_models import SPECIALS, make_tokenizer


def load(folder: Path, made: Library) -> Tokenizer:
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tokenizer"), make_tokenizer())


def test_pieces_cover_the_text(tokenizer: Tokenizer) -> None:
    @given(st.text(max_size=30))
    def check(text: str) -> None:
        pieces = tokenizer.pieces(text)
        assert [p.id for p in pieces] == tokenizer.encode(text)
        assert all(p.text == text[p.start : p.stop] for p in pieces)
        covered = {at for p in pieces for at in range(p.start, p.stop)}
        assert covered == set(range(len(text)))
        assert [p.start for p in pieces] == sorted(p.start for p in pieces)

    check()


def test_offsets_are_characters_and_shared_by_parts_of_one(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.pieces("a\U0001f600b")
    assert [(p.text, p.start, p.stop) for p in pieces] == [
        ("a", 0, 1), *[("\U0001f600", 1, 2)] * 4, ("b", 2, 3),
    ]


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 303
    assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), 2]


def test_added_tokens_are_special_only_if_they_say_so(tmp_path: Path) -> None:
    made = make_tokenizer()
    made.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = load(tmp_path, made)
    assert tokenizer.id_of("<tool>") == 303
    assert 303 not in tokenizer.special_ids
    assert tokenizer.vocab_size == 304
    assert tokenizer.decode(tokenizer.encode("a<tool>")) == "a<tool>"


def test_special_tokens_around_a_prompt_are_optional(tmp_path: Path) -> None:
    made = make_tokenizer()
    made.post_processor = processors.TemplateProcessing(single=f"{SPECIALS[1]} $A", special_tokens=[(SPECIALS[1], 1)])
    tokenizer = load(tmp_path, made)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain]
    assert (tokenizer.pieces("hello")[0].start, tokenizer.pieces("hello")[0].stop) == (0, 0)
    assert [p.id for p in tokenizer.pieces("hello", add_special_tokens=False)] == plain


def test_limits_of_the_file_do_not_cut_or_pad(tmp_path: Path) -> None:
    made = make_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=64, pad_token=SPECIALS[0])
    tokenizer = load(tmp_path, made)
    assert len(tokenizer.encode("x" * 50)) == 50


def test_ids_and_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.text_of(1) == SPECIALS[1]
    assert tokenizer.text_of(10_000) == ""
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.decode([1, *tokenizer.encode("hello")], skip_special_tokens=False) == f"{SPECIALS[1]}hello"


def test_no_text_has_fewer_tokens_than_it_is_said_to(tokenizer: Tokenizer) -> None:
    assert tokenizer.least_tokens("x" * 1000) >= 1000 // 20

    @given(st.text(max_size=50) | st.text("the sky one", max_size=200) | st.integers(0, 500).map(lambda n: "hello " * n))
    def check(text: str) -> None:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))

    check()


def wordpiece() -> Library:
    """A word without tokens, however long, is one unknown token."""
    made = Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def collapsing() -> Library:
    """Runs of spaces become one before they are tokenized."""
    made = make_tokenizer()
    made.normalizer = normalizers.Replace("  ", " ")
    return made


def swallowing() -> Library:
    """A token takes the white space behind it."""
    made = make_tokenizer()
    made.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return made


@pytest.mark.parametrize(
    ("made", "text"),
    [(wordpiece(), "x" * 1000), (collapsing(), " " * 4096), (swallowing(), "<|end|>" + " " * 4000)],
    ids=["unknown", "normalizer", "added"],
)
def test_nothing_is_said_of_texts_that_may_shrink(tmp_path: Path, made: Library, text: str) -> None:
    tokenizer = load(tmp_path, made)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("data", ["", "{}", "not JSON", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, data: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(data)
    with pytest.raises(StartupError, match="is not a tokenizer") as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_a_vocabulary_lacks_do_not_count(tmp_path: Path) -> None:
    """A byte-level tokenizer without some control characters drops them; the bound must not count on them."""
    alphabet = [c for c, byte in byte_alphabet().items() if byte not in (0x04, 0x06, 0xC0, 0xF1, 0xFF)]
    made = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.least_tokens("x" * 1000) == 1000
    for text in ("\x04" * 1000, "a\x04\x06b" * 50, "\U00040000" * 20, "é\x06" * 9):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
