"""OpenAI's Python SDK."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from checks import check, raises, run
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

URL, MODEL = sys.argv[1], sys.argv[2]
client = OpenAI(base_url=f"{URL}/v1", api_key="-", timeout=60, max_retries=0)
MESSAGES = [{"role": "user", "content": "Say hello."}]
PROMPT = "The capital of France is"


@check("models: list and retrieve")
def models() -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    raises(NotFoundError, lambda: client.models.retrieve("no-such-model"))


@check("chat: message, finish reason, usage")
def chat() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=6, temperature=0)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@check("chat: stream with usage in a last chunk without choices")
def stream() -> None:
    chunks = list(client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    ))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


@check("chat: several choices, streamed and not")
def several() -> None:
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 11, "temperature": 1.2}
    reply = client.chat.completions.create(**given)
    assert [c.index for c in reply.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**given, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in reply.choices]


@check("chat: logprobs with bytes")
def logprobs() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode() .startswith(reply.choices[0].message.content[:1])
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob


@check("chat: stop as string and list, logit_bias, seed, penalties, user, metadata")
def parameters() -> None:
    free = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    first = free.choices[0].message.content.split()[0]
    for stop in (first, [first, "zzz"]):
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, stop=stop)
        assert reply.choices[0].finish_reason == "stop"
        assert first not in reply.choices[0].message.content
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, seed=1, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={"500": 5}, user="somebody", metadata={"a": "b"}, store=False, service_tier="auto",
    )
    assert reply.choices[0].message.content is not None


@check("chat: content parts, system message, history")
def parts() -> None:
    reply = client.chat.completions.create(model=MODEL, max_tokens=4, messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello."}]},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Again."},
    ])
    assert reply.choices[0].message.content


@check("chat: structured output parses into a class")
def parsed() -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool
        colour: str

    reply = client.chat.completions.parse(model=MODEL, messages=MESSAGES, max_tokens=200, response_format=Answer)
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(reply.choices[0].message.parsed, Answer)
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=300, response_format={"type": "json_object"}
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)


WEATHER = {
    "type": "object", "properties": {"unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather here", "parameters": WEATHER}}


def is_call(call: Any) -> None:
    assert call.id
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


@check("chat: tools required and named, streamed and not, and their results")
def tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "tools": [TOOL], "tool_choice": choice}
        reply = client.chat.completions.create(**given)
        assert reply.choices[0].finish_reason == "tool_calls"
        assert not reply.choices[0].message.content
        is_call(reply.choices[0].message.tool_calls[0])
        with client.chat.completions.stream(**given) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        is_call(message.tool_calls[0])
    call = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Rain, 7 degrees."}
    reply = client.chat.completions.create(model=MODEL, messages=[*MESSAGES, call, result], max_tokens=8, tools=[TOOL])
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")


@check("chat: tools offered, with tool_choice auto and none")
def tools_offered() -> None:
    for choice in ("auto", "none"):
        given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        given |= {"tools": [TOOL], "tool_choice": choice}
        reply = client.chat.completions.create(**given)
        assert reply.choices[0].message.content
        text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**given, stream=True))
        assert text == reply.choices[0].message.content


@check("responses: text, stream, items, format, function calls")
def responses() -> None:
    given = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 8, "temperature": 0}
    reply = client.responses.create(**given)
    assert reply.output_text
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    with client.responses.stream(**given) as stream:
        events = list(stream)
    kinds, final = [event.type for event in events], events[-1].response
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.output_text == reply.output_text
    history = [{"role": "user", "content": "Say hello."}, *reply.output, {"role": "user", "content": "Again."}]
    assert client.responses.create(model=MODEL, input=history, max_output_tokens=4).output_text
    shape = {"format": {"type": "json_schema", "name": "unit", "schema": WEATHER, "strict": True}}
    assert json.loads(client.responses.create(model=MODEL, input="Unit?", max_output_tokens=60, text=shape).output_text)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    reply = client.responses.create(model=MODEL, input="Unit?", tools=[tool], tool_choice="required", max_output_tokens=60)
    call = reply.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["unit"] in ("C", "F")
    error = raises(BadRequestError, lambda: client.responses.create(**given, previous_response_id="resp_1"))
    assert error.param == "previous_response_id"


@check("chat: calls parse into a class, whole and accumulated")
def parsed_calls() -> None:
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Weather(BaseModel):
        unit: Literal["C", "F"]
        exact: bool

    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "tool_choice": "required"}
    given["tools"] = [pydantic_function_tool(Weather, name="get_weather")]
    call = client.chat.completions.parse(**given).choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**given) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls.function.arguments")]
        message = stream.get_final_completion().choices[0].message
    *deltas, done = events
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments == message.tool_calls[0].function.arguments
    assert isinstance(done.parsed_arguments, Weather)


@check("responses: output and calls parse into classes, whole and streamed")
def parsed_responses() -> None:
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Unit(BaseModel):
        unit: Literal["C", "F"]

    given = {"model": MODEL, "input": "Unit?", "max_output_tokens": 120, "temperature": 0}
    assert isinstance(client.responses.parse(**given, text_format=Unit).output_parsed, Unit)
    with client.responses.stream(**given, text_format=Unit) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Unit)
    assert "response.output_text.done" in kinds
    given |= {"tools": [pydantic_function_tool(Unit, name="get_unit")], "tool_choice": "required"}
    assert isinstance(client.responses.parse(**given).output[0].parsed_arguments, Unit)
    with client.responses.stream(**given) as stream:
        events = [event for event in stream if event.type.startswith("response.function_call_arguments")]
        assert isinstance(stream.get_final_response().output[0].parsed_arguments, Unit)
    *deltas, done = events
    assert "".join(delta.delta for delta in deltas) == done.arguments


@check("completions: text, list of prompts, token ids")
def completions() -> None:
    one = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0)
    two = client.completions.create(model=MODEL, prompt=[PROMPT, "Once upon"], max_tokens=5, temperature=0)
    assert [c.index for c in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    assert client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2).usage.prompt_tokens == 3
    both = client.completions.create(model=MODEL, prompt=[[1, 2, 3], [4, 5]], max_tokens=2)
    assert both.usage.prompt_tokens == 5


@check("completions: stream of several prompts, by index")
def completions_stream() -> None:
    texts = ["", ""]
    chunks = list(client.completions.create(
        model=MODEL, prompt=[PROMPT, "Once upon"], max_tokens=5, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = client.completions.create(model=MODEL, prompt=[PROMPT, "Once upon"], max_tokens=5, temperature=0)
    assert texts == [c.text for c in whole.choices]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@check("completions: echo, logprobs, n, best_of")
def completions_more() -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=2)
    assert reply.choices[0].text.startswith(PROMPT)
    listed = reply.choices[0].logprobs
    assert "".join(listed.tokens) == reply.choices[0].text
    assert listed.token_logprobs[0] is None
    assert all(p <= 0 for p in listed.token_logprobs[1:])
    assert listed.text_offset[0] == 0
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, n=2, best_of=2, temperature=1.0, seed=3)
    assert len(reply.choices) == 2


@check("errors: status, type and parameter")
def errors() -> None:
    refused = (BadRequestError, UnprocessableEntityError)
    error = raises(refused, lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1))
    assert error.param == "temperature"
    assert "temperature" in error.message
    raises(refused, lambda: client.chat.completions.create(model=MODEL, messages=[], max_tokens=2))
    raises(refused, lambda: client.completions.create(model=MODEL, prompt="x", suffix="y"))
    raises(APIStatusError, lambda: client.embeddings.create(model=MODEL, input="x"))


@check("with_raw_response: the request id")
def raw() -> None:
    raw = client.with_raw_response.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices


@check("async twin: chat, stream, many at once")
async def twin() -> None:
    import asyncio

    twin = AsyncOpenAI(base_url=f"{URL}/v1", api_key="-", timeout=60, max_retries=0)

    async def one(n: int) -> str:
        chunks = await twin.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"Count to {n}."}], max_tokens=8, temperature=0, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

    together = await asyncio.gather(*(one(n) for n in range(8)))
    assert together == [await one(n) for n in range(8)]


run()
