"""What the broker's server stores of jobs, holders and events, and how it is read back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from headrace_router.network.jobs import TERMINAL, Event, Holder, Job
from headrace_router.types import End, PromptToken, Token, TopToken

encode = msgspec.msgpack.Encoder().encode
to_json = msgspec.json.Encoder().encode
_token = msgspec.msgpack.Decoder(tuple[int, float, str, bool, list[TopToken] | None, list[PromptToken] | None]).decode
_end = msgspec.msgpack.Decoder(End).decode
read_job = msgspec.msgpack.Decoder(Job).decode
read_holder = msgspec.msgpack.Decoder(Holder).decode


def listed(names: Iterable[str]) -> str:
    """Names as the server compares them: `|a|b|`."""
    return "".join(f"|{name}" for name in sorted(names)) + "|"


def facts_of(job: Job) -> list[Any]:
    """A job as `read_facts` and the payload after it have it."""
    request = job.request
    kept = replace(job, request=replace(request, deadline=None))  # of this process's clock
    return [
        job.id, job.flow, job.weight, job.cost, job.total_tokens, len(request.prompt), request.tenant.name, request.workload,
        listed(job.needs), job.min_tier, job.only or "", encode(kept),
    ]


def packed(token: Token) -> bytes:
    """A token as the data of its entry."""
    return encode((token.id, token.logprob, token.text, token.special, token.top, token.prompt))


def entry_of(event: Event) -> list[Any]:
    """An event as an entry of a log: id, kind, index, data."""
    index, data = event.index, b""
    if event.token is not None:
        data = packed(event.token)
    elif event.end is not None:
        data = encode(event.end)
    elif event.kind in TERMINAL:
        data = to_json(event.facts)
    else:
        index = event.facts["from_index"]
    return [f"{event.attempt}-{event.seq + 1}", event.kind, index, data]


def event_of(entry: list[Any]) -> Event:
    """The event that an entry of a log stands for."""
    name, (_, kind, _, index, _, data) = entry
    attempt, place = map(int, name.split(b"-"))
    seq = place - 1
    match kind:
        case b"token":
            return Event("token", attempt, seq, int(index), Token(*_token(data)))
        case b"done":
            return Event("done", attempt, seq, end=_end(data))
        case b"started" | b"resumed" | b"reset":
            return Event(kind.decode(), attempt, seq, facts={"from_index": int(index)})
    return Event(kind.decode(), attempt, seq, facts=msgspec.json.decode(data))
