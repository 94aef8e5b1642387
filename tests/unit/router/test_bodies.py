"""Bodies, frames and error envelopes."""

from __future__ import annotations

import json

import msgspec
import pytest

from headrace._common.errors import GenerationFailed, InvalidRequest, MalformedBody, Overloaded, TemplateError
from headrace_router import sse
from headrace_router.api.bodies import decode
from headrace_router.api.errors import answer
from headrace_router.api.native_types import generate_decoder
from headrace_router.api.openai_types import ChatBody, chat_decoder


@pytest.mark.parametrize("body", [
    b"", b'{"inputs":"a"', b'{"inputs":"a"} x', b"\xef\xbb\xbf{}", b'{"inputs":"\xc4\xe3"}', b'{"inputs":"\\ud800"}',
    b'{"inputs":"\\udc00\\ud800"}', b'{"inputs":"a","parameters":{"temperature":NaN}}',
    b'{"inputs":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
])
def test_bodies_that_are_not_json(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode(generate_decoder, body)


@pytest.mark.parametrize(("parameters", "field"), [
    ({"temperature": "nan"}, "parameters"), ({"do_sample": "yes"}, "parameters"), ({"stop": [1]}, "parameters"),
    ({"stop": {"a": 1}}, "parameters"), ({"seed": -1}, "parameters"), ({"seed": 1.5}, "parameters"),
    ({"top_n_tokens": -1}, "parameters"), ({"truncate": -3}, "parameters"),
])
def test_values_of_another_shape_are_refused_by_place(parameters: dict[str, object], field: str) -> None:
    body = json.dumps({"inputs": "a", "parameters": parameters}).encode()
    with pytest.raises(InvalidRequest, match=next(iter(parameters))) as caught:
        decode(generate_decoder, body)
    assert caught.value.field == field


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        decode(generate_decoder, b'{"inputs":"a","parameters":{"temperature":1e400}}')


@pytest.mark.parametrize("messages", [
    [{"content": "x"}], [{"role": "wizard", "content": "x"}], ["x"], [{"role": "user", "content": 5}], None, "hi",
    [{"role": "user", "content": [{"type": "video", "url": "x"}]}],
])
def test_malformed_messages(messages: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(chat_decoder, json.dumps({"messages": messages}).encode())
    assert caught.value.field == "messages"


def test_unknown_fields_and_nulls_are_fine() -> None:
    names = [f.name for f in msgspec.structs.fields(ChatBody) if f.name != "messages"]
    body = {"messages": [{"role": "user", "content": "x", "y": 1}], "foo": {"bar": [1]}, **dict.fromkeys(names)}
    assert decode(chat_decoder, json.dumps(body).encode()).messages[0].content == "x"


def test_frames_hold_no_line_breaks_of_any_kind() -> None:
    text = "a\r\n\u2028\u2029\u0085\u00e9"
    frame = sse.frame(msgspec.json.encode({"t": text})).decode()
    assert frame.startswith("data: ")
    assert len(frame.strip("\n").splitlines()) == 1
    assert json.loads(frame[6:])["t"] == text


@pytest.mark.parametrize(("path", "error", "status"), [
    ("/generate", InvalidRequest("x"), 422), ("/v1/completions", InvalidRequest("x"), 400),
    ("/generate", Overloaded("x"), 429), ("/generate", GenerationFailed("x"), 424),
    ("/v1/chat/completions", GenerationFailed("x"), 500), ("/v1/chat/completions", TemplateError("x"), 400),
])
def test_statuses(path: str, error: InvalidRequest, status: int) -> None:
    made = answer(path, error)
    assert made.status == status
    assert isinstance(made.body, bytes)
    body = json.loads(made.body)
    if path.startswith("/v1"):
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert set(body) == {"error", "error_type"}
