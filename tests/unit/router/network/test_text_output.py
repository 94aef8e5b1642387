"""Text of workers that speak it: all of it reaches the client, whatever its pieces, with ids; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common.grammars import Grammar
from headrace._common.tokenizing import Tokenizer
from headrace_router.network.frames import Malformed, TextRow
from headrace_router.network.jobs import Job, Lease
from headrace_router.network.text_output import LONGEST_TEXT, TextOutput, needs
from headrace_router.types import GenerateRequest, Sampling
from tests.fakes.text_models import EOS_ID, write_text_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_text_model(tmp_path_factory.mktemp("text"))
    return Tokenizer(folder / "tokenizer.json")


def output(tokenizer: Tokenizer, most: int = 100, **request: Any) -> TextOutput:
    job = Job("j", "t", 1.0, GenerateRequest(tokenizer.encode("the sky"), most, **request))
    return TextOutput(Lease(job, 1, (), 0.0), tokenizer, (), EOS_ID, 400)


def row(number: int, text: str, finish: str | None = None, token: int | None = None) -> TextRow:
    return "j", 1, number, text, token, -0.5, [], finish


@given(st.lists(st.text(max_size=12), min_size=1, max_size=8))
def test_all_text_leaves_in_order_with_ids_that_write_it(tokenizer: Tokenizer, pieces: list[str]) -> None:
    made = output(tokenizer)
    news = [made.take([row(k, piece)]) for k, piece in enumerate(pieces)]
    news.append(made.take([row(len(pieces), "", "length")]))
    tokens = [token for progress in news for token in progress.tokens]
    assert "".join(token.text for token in tokens) == "".join(pieces)
    assert tokenizer.decode([token.id for token in tokens], skip_special_tokens=False) == "".join(pieces)
    assert [progress.index for progress in news] == [sum(len(p.tokens) for p in news[:k]) for k in range(len(news))]
    end = news[-1].end
    assert end is not None
    assert (end.text, end.generated_tokens, end.finish_reason) == ("".join(pieces), len(tokens), "length")


def test_an_output_that_ends_by_itself_has_one_end_token(tokenizer: Tokenizer) -> None:
    for last in (row(1, "", "eos"), row(1, "", "eos", EOS_ID)):
        news = output(tokenizer).take([row(0, " blue", token=300), last])
        assert [(token.id, token.special) for token in news.tokens] == [(300, False), (EOS_ID, True)]
        assert news.end is not None
        assert (news.end.text, news.end.generated_tokens) == (" blue", 2)


def test_special_tokens_are_silent_unless_they_are_shown(tokenizer: Tokenizer) -> None:
    assert output(tokenizer).take([row(0, "<|im_start|>", token=1)]).tokens[0].text == ""
    assert output(tokenizer, shown_tokens=(1,)).take([row(0, "", token=1)]).tokens[0].text == "<|im_start|>"


def test_stop_strings_count_from_the_least_length_on(tokenizer: Tokenizer) -> None:
    made = output(tokenizer, stop=("two",), keep_stop=False, min_new_tokens=1)
    assert made.take([row(0, "two one t")]).end is None
    news = made.take([row(1, "wo"), row(2, "more")])
    assert news.end is None
    assert made.text == "two one twomore"
    news = made.take([row(3, " t"), row(4, "wo!"), row(5, "beyond")])
    assert news.end is not None
    assert (news.end.finish_reason, news.end.text) == ("stop_sequence", "two one twomore ")


@pytest.mark.parametrize("wrong", [
    [row(1, "x")], [row(0, "x"), row(0, "y")], [row(0, "x" * (LONGEST_TEXT + 1))], [row(0, "x", token=400)],
    [row(0, "x", token=-1)], [row(0, "x", "never")], [row(k, "x") for k in range(4)],
])
def test_rows_that_cannot_be(tokenizer: Tokenizer, wrong: list[TextRow]) -> None:
    with pytest.raises(Malformed):
        output(tokenizer, most=3).take(wrong)


def test_what_requests_need(tokenizer: Tokenizer) -> None:
    assert needs(GenerateRequest([1, 5], 8, Sampling(do_sample=True, seed=3)), (1,)) == set()
    sampling = Sampling(do_sample=True, temperature=0.5, min_p=0.1, logit_bias={3: 1.0}, watermark=True)
    request = GenerateRequest(
        [5], 8, sampling, stop=("x",), min_new_tokens=2, ignore_eos=True, top_n_tokens=1, stop_token_ids=(3,),
        grammar=Grammar("regex", "a+"), shown_tokens=(1,), prompt_logprobs=True,
    )
    assert needs(request, (1,)) == {
        "temperature", "min_p", "logit_bias", "watermark", "min_tokens", "ignore_eos", "top_n_tokens", "stop_token_ids",
        "grammar.regex", "shown_tokens", "prompt_logprobs", "bare_prompt",
    }
