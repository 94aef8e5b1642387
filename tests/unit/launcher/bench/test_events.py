"""Streams of all three APIs, however they are cut into chunks."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace_launcher.bench.events import Api, frames, read_answer

COMPLETIONS = (
    b'data: {"choices": [{"index": 0, "text": "one"}]}\n\n'
    b": ping\n\n"
    b'data: {"choices": [{"index": 0, "text": " two"}]}\r\n\r\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": " two"}}]}\n\n'
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": null}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n'
)
TGI = (
    b'data:{"token": {"id": 1, "text": "one", "special": false}, "generated_text": null, "details": null}\n\n'
    b'data:{"token": {"id": 2, "text": " two", "special": false}, "generated_text": null, "details": null}\n\n'
    b'data:{"token": {"id": 0, "text": "</s>", "special": true}, "generated_text": "one two", '
    b'"details": {"generated_tokens": 3, "input_length": 5}}\n\n'
)
STREAMS: dict[Api, bytes] = {"completions": COMPLETIONS, "chat": CHAT, "tgi": TGI}


@pytest.mark.parametrize("api", get_args(Api))
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_every_api_in_chunks_of_every_size(api: Api, size: int) -> None:
    data = STREAMS[api]
    answer = read_answer(api, [(float(at), data[at : at + size]) for at in range(0, len(data), size)])
    assert (answer.text, answer.tokens, answer.prompt_tokens, answer.error) == ("one two", 3, 5, None)
    assert len(answer.times) == (3 if api == "tgi" else 2)
    assert answer.times == sorted(answer.times)


def test_an_event_has_the_time_of_the_chunk_that_completes_it() -> None:
    found = list(frames([(1.0, b"data: a\n"), (2.0, b"\ndata: b\n\ndata"), (3.0, b": c\n\n"), (4.0, b"data: cut off")]))
    assert found == [(2.0, "a"), (2.0, "b"), (3.0, "c")]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": "overloaded", "error_type": "overloaded"}\n\n', "overloaded"),
        (b"data: {half\n\n", "not JSON: '{half'"),
        (b"", "no output"),
    ],
)
def test_errors(data: bytes, error: str) -> None:
    assert read_answer("tgi", [(0.0, data)]).error == error


def test_without_usage_events_are_counted() -> None:
    chunks = [(0.0, b'data: {"choices": [{"text": "a"}]}\n\n'), (1.0, b'data: {"choices": [{"text": "b"}]}\n\n')]
    answer = read_answer("completions", chunks)
    assert (answer.tokens, answer.completion_tokens) == (2, None)
