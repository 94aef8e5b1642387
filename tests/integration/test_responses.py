"""OpenAI's responses and Anthropic's messages through a whole router, before a shard that says a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes.routers import Reply, Running, running, until
from tests.fakes.scripts import prompts, say, sent
from tests.fakes.text_models import write_text_model
from tests.integration.test_tools import CALL, NOW, QWEN, WEATHER

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER}
NOW_TOOL = {"type": "function", "name": "now", "parameters": None}
USE = {"name": "get_weather", "description": "Weather", "input_schema": WEATHER}
USE_NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
ASK = [{"role": "user", "content": "hi"}]
EVERYTHING = f"<think>\nhm, hm\n</think>\n\nhello\n{CALL}\n{NOW}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    write_text_model(tmp_path, QWEN)
    async with running(tmp_path) as made:
        yield made
        await made.settled()


def named(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of each event; both say the same name."""
    frames = [frame.split("\n") for frame in reply.raw.decode().split("\n\n") if frame and not frame.startswith(":")]
    made = [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in frames]
    assert all(name == data["type"] for name, data in made)
    return made


# --- responses ---


async def test_a_response(server: Running) -> None:
    say(server, EVERYTHING)
    reply = await server.post(RESPONSES, {"input": "hi", "tools": [TOOL, NOW_TOOL], "max_output_tokens": 300})
    assert reply.status == 200, reply.raw
    made = reply.json
    assert (made["object"], made["status"], made["error"], made["store"]) == ("response", "completed", None, False)
    thoughts, message, call, now = made["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm, hm"}]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", '{"city": "Bonn"}')
    assert call["call_id"] != now["call_id"]
    usage = made["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


def rebuilt(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The output that a client adds up of deltas."""
    items: list[dict[str, Any]] = []
    for name, event in events:
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind == "output_item.done":
            item["status"] = "completed"
            assert item == event["item"]
    return items


async def test_a_streamed_response(server: Running) -> None:
    say(server, EVERYTHING)
    reply = await server.post(RESPONSES, {"input": "hi", "tools": [TOOL, NOW_TOOL], "stream": True})
    events = named(reply)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert list(dict.fromkeys(names)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done", "output_text.delta", "output_text.done", "function_call_arguments.delta",
        "function_call_arguments.done", "completed",
    ]
    assert events[0][1]["response"]["status"] == "in_progress"
    assert events[0][1]["response"]["output"] == []
    last = events[-1][1]["response"]
    assert (last["status"], last["output"]) == ("completed", rebuilt(events))
    assert last["id"] == events[0][1]["response"]["id"]
    assert reply.done == 0


async def test_a_response_that_the_limit_cuts(server: Running) -> None:
    say(server, "hello there")
    body = {"input": "hi", "max_output_tokens": 1}
    made = (await server.post(RESPONSES, body)).json
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["status"] == "incomplete"
    assert named(await server.post(RESPONSES, {**body, "stream": True}))[-1][0] == "response.incomplete"


async def test_items_of_a_conversation(server: Running) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call", "call_id": "call_2", "name": "get_weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    reply = await server.post(RESPONSES, {"input": items, "instructions": "Be kind.", "max_output_tokens": 1})
    assert reply.status == 200, reply.raw
    assert prompts(server)[0] == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nI look.<call>get_weather Bonn</call><call>get_weather Ulm</call><|im_end|>\n"
        "<|im_start|>tool\nrain of call_1 get_weather<|im_end|>\n<|im_start|>tool\nsun of call_2 get_weather<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_what_holds_a_response_to_a_form(server: Running) -> None:
    text = {"format": {"type": "json_schema", "name": "s", "schema": WEATHER, "strict": True}}
    for more in ({"text": text}, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}):
        reply = await server.post(RESPONSES, {"input": "hi", "max_output_tokens": 1, **more})
        assert reply.status == 200, reply.raw
    assert [request.grammar.type for request in sent(server)] == ["json_schema", "lark"]


@pytest.mark.parametrize(("body", "param"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"), ({"input": [{"role": "user"}]}, "input"),
    ({"input": []}, "input"), ({"tools": [{"type": "web_search"}]}, "tools"), ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format"), ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text"), ({"service_tier": "x"}, "service_tier"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
])
async def test_refused_responses(server: Running, body: dict[str, Any], param: str) -> None:
    reply = await server.post(RESPONSES, {"input": "hi", **body})
    assert reply.status == 400, reply.raw
    assert reply.json["error"]["param"] == param, reply.raw
    assert param in reply.json["error"]["message"]


# --- messages ---


async def test_a_message(server: Running) -> None:
    say(server, EVERYTHING)
    reply = await server.post(MESSAGES, {"messages": ASK, "tools": [USE, USE_NOW], "max_tokens": 300, "model": "x"})
    assert reply.status == 200, reply.raw
    made = reply.json
    assert (made["type"], made["role"]) == ("message", "assistant")
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    thoughts, text, call, now = made["content"]
    assert thoughts == {"type": "thinking", "thinking": "hm, hm", "signature": ""}
    assert text == {"type": "text", "text": "hello"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Bonn"})
    assert now["input"] == {}
    count = await server.post(COUNT, {"messages": ASK, "tools": [USE, USE_NOW], "model": "x"})
    assert count.json == {"input_tokens": made["usage"]["input_tokens"]}
    assert made["usage"]["output_tokens"] > 20


async def test_a_streamed_message(server: Running) -> None:
    say(server, EVERYTHING)
    body = {"messages": ASK, "tools": [USE, USE_NOW], "max_tokens": 300}
    whole = (await server.post(MESSAGES, body)).json
    events = named(await server.post(MESSAGES, {**body, "stream": True}))
    assert events[0][0] == "message_start"
    assert events[0][1]["message"]["content"] == []
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for name, event in events[1:-2]:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "raw": ""})
        elif name == "content_block_delta":
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            blocks[event["index"]]["raw"] += text
        else:
            assert (name, event["index"]) == ("content_block_stop", len(blocks) - 1)
    assert [block["raw"] for block in blocks] == ["hm, hm", "hello", '{"city": "Bonn"}', "{}"]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize(("more", "reason", "stop"), [
    ({}, "end_turn", None), ({"max_tokens": 1}, "max_tokens", None), ({"stop_sequences": ["th", "x"]}, "stop_sequence", "th"),
])
async def test_why_a_message_stops(server: Running, more: dict[str, Any], reason: str, stop: str | None) -> None:
    say(server, "hello there")
    made = (await server.post(MESSAGES, {"messages": ASK, "max_tokens": 30, **more})).json
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, stop)
    assert stop is None or made["content"] == [{"type": "text", "text": "hello "}]
    delta = named(await server.post(MESSAGES, {"messages": ASK, "max_tokens": 30, "stream": True, **more}))[-2][1]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": stop}


async def test_what_holds_a_message_to_a_form(server: Running) -> None:
    config = {"format": {"type": "json_schema", "schema": WEATHER}, "effort": "low"}
    reply = await server.post(MESSAGES, {"messages": ASK, "max_tokens": 1, "output_config": config})
    assert reply.status == 200, reply.raw
    assert sent(server)[0].grammar.type == "json_schema"


async def test_blocks_of_a_conversation(server: Running) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And?"}]},
    ]
    reply = await server.post(MESSAGES, {
        "messages": conversation, "system": [{"type": "text", "text": "Be kind."}], "max_tokens": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    })
    assert reply.status == 200, reply.raw
    assert prompts(server)[0] == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nI look.<call>get_weather Bonn</call><|im_end|>\n"
        "<|im_start|>tool\nrain of toolu_1 get_weather<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(("choice", "shown", "grammar"), [
    ({"type": "any"}, True, True), ({"type": "tool", "name": "get_weather"}, True, True), ({"type": "none"}, False, False),
    ({"type": "auto", "disable_parallel_tool_use": True}, True, False),
])
async def test_tool_choices(server: Running, choice: dict[str, Any], shown: bool, grammar: bool) -> None:
    say(server, CALL + CALL)
    reply = await server.post(MESSAGES, {"messages": ASK, "tools": [USE], "tool_choice": choice, "max_tokens": 300})
    assert ("<tools>" in prompts(server)[0], sent(server)[0].HasField("grammar")) == (shown, grammar)
    if choice["type"] == "auto":
        assert len(reply.json["content"]) == 1


@pytest.mark.parametrize(("body", "words"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "assistant"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [USE], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"temperature": 1.5}, "temperature"), ({"stop_sequences": ["a"] * 9}, "stop_sequences"), ({"container": "x"}, "container"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "output_config"),
])
async def test_refused_messages(server: Running, body: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        reply = await server.post(MESSAGES, {"messages": ASK, "max_tokens": 5, "stream": stream, **body})
        assert reply.status == 400, reply.raw
        assert (reply.json["type"], reply.json["error"]["type"]) == ("error", "invalid_request_error")
        assert words in reply.json["error"]["message"]


async def test_threads_are_refused_in_the_way_that_clients_go_on_without(server: Running) -> None:
    reply = await server.post(MESSAGES, {"messages": ASK, "max_tokens": 5, "thread": {"type": "create"}})
    assert (reply.status, reply.json["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


async def test_keys_as_anthropics_clients_send_them(tmp_path: Path) -> None:
    write_text_model(tmp_path, QWEN)
    async with running(tmp_path, api_key="secret") as server:
        body = {"messages": ASK, "max_tokens": 1}
        assert (await server.post(MESSAGES, body, **{"x-api-key": "secret"})).status == 200
        reply = await server.post(MESSAGES, body)
        assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(("path", "body", "last"), [
    (RESPONSES, {"input": "hi"}, "response.failed"), (MESSAGES, {"messages": ASK, "max_tokens": 500}, "error"),
])
async def test_streams_that_fail(server: Running, path: str, body: dict[str, Any], last: str) -> None:
    server.shard.step_seconds = 0.02
    response = await server.session.post(server.url + path, json={**body, "stream": True})
    begun = await response.content.readline()
    for _ in range(2):  # after the first time the router tries again
        await until(lambda: server.shard.rows == 1)
        server.shard.fail(grpc.StatusCode.INTERNAL, "told to")
    raw = begun + await response.content.read()
    events = named(Reply(200, response.headers.copy(), raw))
    assert events[-1][0] == last
    assert sum(name == last for name, _ in events) == 1


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, {"input": "hi"}), (MESSAGES, {"messages": ASK, "max_tokens": 5})])
async def test_a_slip_within_a_stream_is_its_last_event(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def slip(*_: object) -> None:
        raise ZeroDivisionError

    say(server, "hello")
    monkeypatch.setattr("headrace_router.service.Ticket.ended", slip)
    name, event = named(await server.post(path, {**body, "stream": True}))[-1]
    assert name == "error"
    assert "internal error" in str(event)
