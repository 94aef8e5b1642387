"""Tools and thoughts through a whole router, before a shard that says a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.routers import Reply, Running, running
from tests.fakes.scripts import prompts, say, sent
from tests.fakes.text_models import CHATML, write_text_model

PATH = "/v1/chat/completions"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><tool_call>"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments.city }}</call>"
    "{% endfor %}"
    "{% if message.role == 'tool' %} of {{ message.tool_call_id }} {{ message.name }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}{# </think> #}"
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    write_text_model(tmp_path, QWEN)
    async with running(tmp_path) as made:
        yield made
        await made.settled()


def accumulated(reply: Reply) -> dict[str, Any]:
    """The message that a client adds up, and the finish reason."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for choice in (choice for event in reply.events for choice in event["choices"]):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            made[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] not in made["calls"]
                assert piece["type"] == "function"
                made["calls"][piece["index"]] = [piece["function"]["name"], ""]
            made["calls"][piece["index"]][1] += piece["function"].get("arguments", "")
        made["finish_reason"] = choice["finish_reason"]
    made["calls"] = [tuple(made["calls"][index]) for index in sorted(made["calls"])]
    return made


async def both(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call, which is the same whole and streamed."""
    whole = await server.post(PATH, body)
    assert whole.status == 200, whole.raw
    choice = whole.json["choices"][0]
    message = choice["message"]
    made = {
        "content": message["content"] or "", "reasoning_content": message.get("reasoning_content", ""),
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }
    stream = await server.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert accumulated(stream) == made
    assert stream.events[-1]["usage"] == whole.json["usage"]
    return made


# --- calls ---


async def test_calls_beside_text(server: Running) -> None:
    say(server, f"I look.\n{CALL}\n{NOW}")
    made = await both(server, ASK)
    assert made == {
        "content": "I look.", "reasoning_content": "", "calls": [("get_weather", '{"city": "Bonn"}'), ("now", "{}")],
        "finish_reason": "tool_calls",
    }


async def test_a_call_alone_has_no_content(server: Running) -> None:
    say(server, CALL)
    message = (await server.post(PATH, ASK)).json["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"
    assert message["tool_calls"][0]["id"].startswith("call_")


async def test_the_first_delta_names_the_call_and_the_rest_are_arguments(server: Running) -> None:
    say(server, CALL)
    events = (await server.post(PATH, {**ASK, "stream": True})).events
    deltas = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(deltas) > 3
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in deltas[1:])
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
async def test_without_tools_markup_is_text(server: Running, more: dict[str, Any]) -> None:
    say(server, CALL)
    made = await both(server, {**ASK, **more})
    assert made == {"content": CALL, "reasoning_content": "", "calls": [], "finish_reason": "stop"}
    assert "<tools>" not in prompts(server)[0]


async def test_what_is_no_call_stays_text(server: Running) -> None:
    text = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    say(server, text)
    assert (await both(server, ASK))["content"] == text


async def test_one_call_where_one_is_allowed(server: Running) -> None:
    say(server, CALL + NOW)
    made = await both(server, {**ASK, "parallel_tool_calls": False})
    assert made["calls"] == [("get_weather", '{"city": "Bonn"}')]


async def test_a_call_that_the_limit_cuts(server: Running) -> None:
    say(server, CALL)
    made = await both(server, {**ASK, "max_tokens": len(server.router.service.text.tokenizer.encode(CALL)) - 20})
    assert made["finish_reason"] == "length"
    assert made["calls"][0][0] == "get_weather"
    assert '{"city": "Bonn"}'.startswith(made["calls"][0][1])


async def test_several_choices(server: Running) -> None:
    say(server, CALL)
    events = (await server.post(PATH, {**ASK, "n": 2, "stream": True})).events
    ids = {c["index"]: d["id"] for e in events for c in e["choices"] for d in c["delta"].get("tool_calls", ()) if "id" in d}
    assert set(ids) == {0, 1}
    assert ids[0] != ids[1]


async def test_log_probabilities_are_all_there(server: Running) -> None:
    say(server, f"I look. {CALL}")
    body = {**ASK, "logprobs": True, "return_token_ids": True}
    whole = (await server.post(PATH, body)).json["choices"][0]
    choices = [c for e in (await server.post(PATH, {**body, "stream": True})).events for c in e["choices"]]
    assert [t for c in choices for t in (c["logprobs"] or {}).get("content", ())] == whole["logprobs"]["content"]
    assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]


async def test_functions_as_they_were_before_tools(server: Running) -> None:
    say(server, CALL)
    body = {"messages": ASK["messages"], "max_tokens": 300, "functions": [t["function"] for t in TOOLS]}
    choice = (await server.post(PATH, body)).json["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    deltas = [c["delta"] for e in (await server.post(PATH, {**body, "stream": True})).events for c in e["choices"]]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert pieces[0]["name"] == "get_weather"
    assert "".join(piece["arguments"] for piece in pieces) == '{"city": "Bonn"}'


# --- what the model gets ---


async def test_tools_reach_the_template(server: Running) -> None:
    await server.post(PATH, {**ASK, "max_tokens": 1})
    shown = prompts(server)[0].partition("<tools>")[2].partition("</tools>")[0]
    assert shown.startswith(json.dumps(TOOLS[0]))
    assert '"now"' in shown


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]
OLD_HISTORY: list[dict[str, Any]] = [
    HISTORY[0],
    {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}},
    {"role": "function", "name": "get_weather", "content": "rain"},
]


async def test_a_history_of_calls_reaches_the_template(server: Running) -> None:
    await server.post(PATH, {**ASK, "messages": HISTORY, "max_tokens": 1})
    start = "assistant\n<call>get_weather Bonn</call><|im_end|>\n<|im_start|>tool\nrain of"
    assert f"{start} call_1 get_weather<" in prompts(server)[0]
    await server.post(PATH, {**ASK, "messages": OLD_HISTORY, "max_tokens": 1})
    assert f"{start}  get_weather<" in prompts(server)[1]


async def test_a_template_that_knows_no_tools(tmp_path: Path) -> None:
    write_text_model(tmp_path, CHATML)
    async with running(tmp_path) as server:
        say(server, CALL)
        made = await both(server, {**ASK, "max_tokens": 90, "messages": [{"role": "system", "content": "Be kind."}, *HISTORY]})
        assert made["calls"] == [("get_weather", '{"city": "Bonn"}')]
        system, user, assistant, tool, _ = prompts(server)[0].split("<|im_end|>\n")
        assert system.startswith("<|im_start|>system\nBe kind.\n\n")
        assert json.dumps(TOOLS[0]) in system
        assert user == "<|im_start|>user\nhi"
        assert assistant == f"<|im_start|>assistant\n{CALL}"
        assert tool == "<|im_start|>user\n<tool_response>\nrain\n</tool_response>"


async def test_short_ids_for_templates_that_want_them(tmp_path: Path) -> None:
    write_text_model(tmp_path, (
        "{% for m in messages %} {{ m.tool_call_id or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.id }}{% endfor %}"
        "{% endfor %}"
    ))
    async with running(tmp_path) as server:
        await server.post(PATH, {"messages": HISTORY, "max_tokens": 1})
        called, answered = prompts(server)[0].split("[TOOL_CALLS]")[1].split()
        assert called == answered
        assert len(called) == 9
        assert called.isalnum()


async def test_tokens_of_a_conversation_with_tools(server: Running) -> None:
    await server.post(PATH, {**ASK, "max_tokens": 1})
    reply = await server.post("/chat_tokenize", {"messages": ASK["messages"], "tools": TOOLS})
    assert reply.json["templated_text"] == prompts(server)[0]
    counted = await server.post("/tokenize", {"messages": ASK["messages"], "tools": TOOLS})
    assert counted.json["tokens"] == list(sent(server)[0].token_ids.ids)


# --- what holds the model to it ---


def grammar(server: Running) -> str:
    request = sent(server)[-1]
    return f"{request.grammar.type}: {request.grammar.value}" if request.HasField("grammar") else ""


@pytest.mark.parametrize(("more", "words", "not_words"), [
    ({"tool_choice": "required"}, ["get_weather", "now"], [")*"]),
    ({"tool_choice": "required", "parallel_tool_calls": True}, [")*"], []),
    ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"], ["get_weather"]),
    ({"tool_choice": "now"}, ["now"], ["get_weather"]),
    ({"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]}, ["free", "get_weather"], ["now"]),
    ({"response_format": {"type": "json_object"}}, ["body", "get_weather"], ["free"]),
    ({"functions": [TOOLS[1]["function"]], "tools": None, "function_call": {"name": "now"}}, ["now"], []),
])
async def test_grammars(server: Running, more: dict[str, Any], words: list[str], not_words: list[str]) -> None:
    reply = await server.post(PATH, {**ASK, **more, "max_tokens": 1})
    assert reply.status == 200, reply.raw
    made = grammar(server)
    assert made.startswith("lark: ")
    assert all(word in made for word in words)
    assert not any(word in made for word in not_words)


async def test_auto_holds_the_model_to_nothing(server: Running) -> None:
    await server.post(PATH, {**ASK, "max_tokens": 1})
    assert grammar(server) == ""
    await server.post(PATH, {**ASK, "tool_choice": "none", "response_format": {"type": "json_object"}, "max_tokens": 1})
    assert grammar(server) == "json_object: "


@pytest.mark.parametrize(("more", "param", "words"), [
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice", "'nope'"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'sometimes'"), ({"tool_choice": {"function": {}}}, "tool_choice", "name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "same name"), ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "length"),
    ({"functions": []}, "functions", "exclude"), ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "exclude"),
    ({"guided_regex": "a"}, "tools", "not supported"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"uniqueItems": True}}}}}]}, "tools", "uniqueItems"),
])
async def test_refusals(server: Running, more: dict[str, Any], param: str, words: str) -> None:
    reply = await server.post(PATH, {**ASK, **more})
    assert reply.status == 400, reply.raw
    assert reply.json["error"]["param"] == param
    assert words in reply.json["error"]["message"]


# --- thoughts ---

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("prefilled", [True, False])
async def test_thoughts(server: Running, prefilled: bool) -> None:
    say(server, ("" if prefilled else "<think>\n") + "hm, hm\n</think>\n\nhello\n" + CALL)
    body = {**ASK, **(THINKING if prefilled else {})}
    made = await both(server, body)
    assert made["reasoning_content"] == "hm, hm"
    assert made["content"] == "hello"
    assert [name for name, _ in made["calls"]] == ["get_weather"]
    usage = (await server.post(PATH, body)).json["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


async def test_an_answer_without_thoughts(server: Running) -> None:
    say(server, "hello")
    made = await both(server, {"messages": ASK["messages"], "max_tokens": 9})
    assert made == {"content": "hello", "reasoning_content": "", "calls": [], "finish_reason": "stop"}


async def test_a_grammar_leaves_no_place_for_thoughts(server: Running) -> None:
    say(server, "{}")
    made = await both(server, {
        "messages": ASK["messages"], "max_tokens": 9, "response_format": {"type": "json_object"}, **THINKING
    })
    assert (made["content"], made["reasoning_content"]) == ("{}", "")


async def test_thoughts_stay_in_the_answer_if_the_operator_wants(tmp_path: Path) -> None:
    write_text_model(tmp_path, QWEN)
    async with running(tmp_path, reasoning_parser="none") as server:
        say(server, "<think>a</think>b")
        assert (await both(server, {"messages": ASK["messages"], "max_tokens": 99}))["content"] == "<think>a</think>b"


async def test_the_operator_names_the_formats(tmp_path: Path) -> None:
    write_text_model(tmp_path, CHATML)
    async with running(tmp_path, tool_call_parser="pythonic", reasoning_parser="deepseek_r1") as server:
        say(server, "hm</think>[get_weather(city='Bonn')]")
        made = await both(server, ASK)
        assert made["reasoning_content"] == "hm"
        assert made["calls"] == [("get_weather", '{"city": "Bonn"}')]


async def test_special_tokens_that_are_markup(tmp_path: Path) -> None:
    write_text_model(tmp_path, CHATML)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 400, "content": "[TOOL_CALLS]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    async with running(tmp_path, tool_call_parser="mistral") as server:
        say(server, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bonn"}}]')
        assert (await both(server, ASK))["calls"] == [("get_weather", '{"city": "Bonn"}')]
        assert prompts(server)[0].endswith("assistant\n")
        say(server, '[{"name": "get_weather", "arguments": {"city": "Bonn"}}]')
        made = await both(server, {**ASK, "tool_choice": "required"})
        assert made["calls"] == [("get_weather", '{"city": "Bonn"}')]
        assert prompts(server)[-1].endswith("assistant\n[TOOL_CALLS]")
        strict = {**TOOLS[1], "function": {"name": "now", "strict": True}}
        marker = f"<[{server.router.service.text.tokenizer.id_of('[TOOL_CALLS]')}]>"
        for body in ({"tools": [strict]}, {"response_format": {"type": "json_object"}}):
            assert (await server.post(PATH, {**ASK, **body})).status == 200
            assert marker in grammar(server)
