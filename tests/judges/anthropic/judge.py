"""Anthropic's Python SDK."""

import json
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError
from checks import check, raises, run

URL, MODEL = sys.argv[1], sys.argv[2]
client = Anthropic(base_url=URL, api_key="-", timeout=60, max_retries=0)
MESSAGES = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}  # this version has no parameter for it
UNIT = {
    "type": "object", "properties": {"unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["unit"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather here", "input_schema": UNIT}


@check("messages: text, stop reason, usage, count_tokens")
def message() -> None:
    reply = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=6, system="Be brief.")
    assert (reply.type, reply.role) == ("message", "assistant")
    assert reply.content[0].text
    assert reply.stop_reason in ("end_turn", "max_tokens")
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.").input_tokens
    assert count == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


@check("messages: stream, the same text as whole")
def stream() -> None:
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "extra_body": GREEDY}
    reply = client.messages.create(**given)
    with client.messages.stream(**given) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == reply.content[0].text
    assert final.stop_reason == reply.stop_reason
    assert final.usage.output_tokens == reply.usage.output_tokens


@check("messages: a stop sequence")
def stop() -> None:
    free = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=12, extra_body=GREEDY)
    first = free.content[0].text.split()[0]
    reply = client.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, stop_sequences=[first], extra_body=GREEDY
    )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", first)


@check("messages: tools any and by name, streamed and not, and their results")
def tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "tools": [TOOL], "tool_choice": choice}
        reply = client.messages.create(**given)
        assert reply.stop_reason == "tool_use"
        assert reply.content[0].name == "get_weather"
        assert reply.content[0].input["unit"] in ("C", "F")
        with client.messages.stream(**given) as events:
            kinds, pieces = [], []
            for event in events:
                kinds.append(event.type)
                if event.type == "input_json":
                    pieces.append(event.partial_json)
            final = events.get_final_message()
        assert final.stop_reason == "tool_use"
        assert json.loads("".join(pieces)) == final.content[0].input
        assert final.content[0].input["unit"] in ("C", "F")
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    result = {"type": "tool_result", "tool_use_id": final.content[0].id, "content": "Rain, 7 degrees."}
    history = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, messages=history, max_tokens=8, tools=[TOOL]).content


@check("messages: output that follows a schema")
def schema() -> None:
    shape = {"format": {"type": "json_schema", "schema": UNIT}}
    reply = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=60, output_config=shape)
    assert json.loads(reply.content[0].text)["unit"] in ("C", "F")


@check("messages: parse into a class; the tool runner calls the function, streamed and not")
def parsed() -> None:
    from anthropic import beta_tool
    from pydantic import BaseModel

    class Unit(BaseModel):
        unit: Literal["C", "F"]

    reply = client.messages.parse(model=MODEL, messages=MESSAGES, max_tokens=60, output_format=Unit)
    assert isinstance(reply.parsed_output, Unit)
    called = []

    @beta_tool
    def get_weather(unit: Literal["C", "F"]) -> str:
        """The weather here."""
        called.append(unit)
        return "Rain, 7 degrees."

    for stream in (False, True):
        runner = client.beta.messages.tool_runner(
            model=MODEL, messages=MESSAGES, max_tokens=60, tools=[get_weather], tool_choice={"type": "any"},
            max_iterations=2, stream=stream,
        )
        for turn in runner:
            if stream:
                turn.get_final_message()
    assert len(called) >= 2
    assert set(called) <= {"C", "F"}


@check("errors: status and type")
def errors() -> None:
    error = raises(BadRequestError, lambda: client.messages.create(model=MODEL, messages=[], max_tokens=3))
    assert error.body["error"]["type"] == "invalid_request_error"
    raises(NotFoundError, lambda: client.messages.batches.list())


@check("async twin: stream")
async def twin() -> None:
    twin = AsyncAnthropic(base_url=URL, api_key="-", timeout=60, max_retries=0)
    async with twin.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=6) as events:
        assert "".join([text async for text in events.text_stream])


run()
