"""huggingface_hub's InferenceClient pointed at a server, sync and async."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checks import check, run
from huggingface_hub import AsyncInferenceClient, InferenceClient

URL = sys.argv[1]
client = InferenceClient(URL, timeout=60)
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Say hello."}]


@check("text_generation: text")
def text() -> None:
    reply = client.text_generation(PROMPT, max_new_tokens=5)
    assert isinstance(reply, str)
    assert reply


@check("text_generation: details")
def details() -> None:
    reply = client.text_generation(PROMPT, max_new_tokens=5, details=True, decoder_input_details=True)
    assert reply.details.generated_tokens == 5
    assert reply.details.finish_reason == "length"
    assert len(reply.details.prefill) > 3


@check("text_generation: stream")
def stream() -> None:
    pieces = list(client.text_generation(PROMPT, max_new_tokens=5, stream=True))
    assert len(pieces) == 5
    assert client.text_generation(PROMPT, max_new_tokens=5, return_full_text=False) == "".join(pieces)
    assert client.text_generation(PROMPT, max_new_tokens=5) == PROMPT + "".join(pieces)  # the default of POST /


@check("text_generation: stream with details")
def stream_details() -> None:
    events = list(client.text_generation(PROMPT, max_new_tokens=5, stream=True, details=True))
    assert len(events) == 5
    assert events[-1].details.finish_reason == "length"
    assert events[-1].generated_text


@check("text_generation: sampling parameters, stop, best_of, top_n_tokens")
def parameters() -> None:
    reply = client.text_generation(
        PROMPT, max_new_tokens=8, do_sample=True, temperature=0.7, top_k=30, top_p=0.9, typical_p=0.95,
        repetition_penalty=1.1, best_of=2, top_n_tokens=2, stop=["\n"], details=True, truncate=100,
    )
    assert len(reply.details.best_of_sequences) == 1
    assert len(reply.details.top_tokens[0]) == 2


@check("text_generation: grammar")
def grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    reply = client.text_generation(
        "JSON:", max_new_tokens=40, return_full_text=False, grammar={"type": "json", "value": schema}
    )
    assert isinstance(json.loads(reply)["a"], bool)


@check("chat_completion: message")
def chat() -> None:
    reply = client.chat_completion(MESSAGES, max_tokens=8)
    assert reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 8


@check("chat_completion: stream with usage")
def chat_stream() -> None:
    chunks = list(client.chat_completion(MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.total_tokens > 0


@check("chat_completion: logprobs, seed, stop, penalties")
def chat_parameters() -> None:
    reply = client.chat_completion(
        MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, seed=5, temperature=0.5, top_p=0.9, stop=["zzz"],
        frequency_penalty=0.1, presence_penalty=0.1,
    )
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


@check("chat_completion: response_format with a JSON schema")
def response_format() -> None:
    schema = {
        "type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False,
    }
    reply = client.chat_completion(
        MESSAGES, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}},
    )
    assert isinstance(json.loads(reply.choices[0].message.content)["n"], int)


@check("chat.completions.create, as OpenAI's client has it")
def openai_like() -> None:
    reply = client.chat.completions.create(messages=MESSAGES, max_tokens=4)
    assert reply.choices[0].message.content


@check("async twin")
async def twin() -> None:
    twin = AsyncInferenceClient(URL, timeout=60)
    assert await twin.text_generation(PROMPT, max_new_tokens=5) == client.text_generation(PROMPT, max_new_tokens=5)
    pieces = [p async for p in await twin.text_generation(PROMPT, max_new_tokens=5, stream=True)]
    assert pieces
    reply = await twin.chat_completion(MESSAGES, max_tokens=4)
    assert reply.choices[0].message.content
    chunks = [c async for c in await twin.chat_completion(MESSAGES, max_tokens=4, stream=True)]
    assert chunks


run()
