"""TGI's own Python client, as its users call it.

Its `chat(stream=True)` is left out: this version wants `role` and `tool_calls` in every delta, which no server sends.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checks import check, raises, run
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import FinishReason

URL = sys.argv[1]
client = Client(URL, timeout=60)
PROMPT = "The capital of France is"


@check("generate: text, details, finish reason")
def generate() -> None:
    reply = client.generate(PROMPT, max_new_tokens=5)
    assert reply.generated_text
    assert reply.details.generated_tokens == len(reply.details.tokens) == 5
    assert reply.details.finish_reason == FinishReason.Length
    assert "".join(t.text for t in reply.details.tokens if not t.special) == reply.generated_text
    assert client.generate(PROMPT, max_new_tokens=5).generated_text == reply.generated_text


@check("generate: the prompt's tokens")
def prefill() -> None:
    reply = client.generate(PROMPT, max_new_tokens=2, decoder_input_details=True)
    assert [t.text for t in reply.details.prefill][-1] == " is"
    assert reply.details.prefill[0].logprob is None
    assert all(t.logprob <= 0 for t in reply.details.prefill[1:])


@check("generate: best_of")
def best_of() -> None:
    reply = client.generate(PROMPT, max_new_tokens=8, best_of=2, do_sample=True, temperature=1.5)
    assert reply.details.best_of_sequences is not None
    assert len(reply.details.best_of_sequences) == 1
    assert reply.details.best_of_sequences[0].generated_tokens >= 1


@check("generate: top_n_tokens")
def top_tokens() -> None:
    reply = client.generate(PROMPT, max_new_tokens=4, top_n_tokens=3)
    assert [len(tops) for tops in reply.details.top_tokens] == [3] * 4
    for token, tops in zip(reply.details.tokens, reply.details.top_tokens, strict=True):
        assert tops[0].id == token.id
    assert not client.generate(PROMPT, max_new_tokens=2).details.top_tokens


@check("generate: seed, temperature, top_k, top_p, penalties, truncate, return_full_text")
def parameters() -> None:
    given = {
        "max_new_tokens": 6, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "seed": 7, "return_full_text": True, "truncate": 3, "typical_p": 0.9,
    }
    first, second = client.generate(PROMPT, **given), client.generate(PROMPT, **given)
    assert first.generated_text == second.generated_text
    assert first.generated_text.startswith(PROMPT)
    assert first.details.seed == 7


@check("generate: stop sequence")
def stop() -> None:
    whole = client.generate(PROMPT, max_new_tokens=20).generated_text
    word = whole.split()[1]
    reply = client.generate(PROMPT, max_new_tokens=20, stop_sequences=[word])
    assert reply.generated_text.endswith(word)
    assert reply.details.finish_reason == FinishReason.StopSequence


@check("generate: watermark")
def watermark() -> None:
    assert client.generate(PROMPT, max_new_tokens=6, watermark=True, do_sample=True, seed=1).generated_text


@check("generate_stream: the last event has text and details, earlier ones have not")
def stream() -> None:
    events = list(client.generate_stream(PROMPT, max_new_tokens=6))
    assert all(e.generated_text is None and e.details is None for e in events[:-1])
    assert events[-1].details.generated_tokens == len(events) == 6
    assert "".join(e.token.text for e in events) == events[-1].generated_text
    assert events[-1].generated_text == client.generate(PROMPT, max_new_tokens=6).generated_text


@check("generate: a grammar")
def grammar() -> None:
    from text_generation.types import Grammar, GrammarType

    reply = client.generate(
        "The weather is", max_new_tokens=20, grammar=Grammar(type=GrammarType.Regex, value="(sunny|rainy)")
    )
    assert reply.generated_text in ("sunny", "rainy")


@check("chat: message, usage")
def chat() -> None:
    reply = client.chat(messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
    assert reply.choices[0].message.content
    assert reply.usage["completion_tokens"] <= 8


@check("errors: what the server refuses is a ValidationError")
def refused() -> None:
    error = raises(ValidationError, lambda: client.generate(PROMPT, max_new_tokens=10**6))
    assert "max_new_tokens" in str(error)


@check("async twin: generate and generate_stream")
async def twin() -> None:
    twin = AsyncClient(URL, timeout=60)
    reply = await twin.generate(PROMPT, max_new_tokens=5)
    events = [e async for e in twin.generate_stream(PROMPT, max_new_tokens=5)]
    assert events[-1].generated_text == reply.generated_text


run()
