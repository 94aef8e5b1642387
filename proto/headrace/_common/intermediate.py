"""One token of one request, as both ends of the gRPC contract see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Token:
    """A token id of the model's vocabulary and the log probability that the model gave it."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Intermediate:
    """What one step made for one request. `is_end` marks its last token."""

    request_id: int
    token: Token
    is_end: bool


def read_step(step: generation_pb2.Step) -> Iterator[Intermediate]:
    """The packed columns of a Step as `Intermediate`s, in order.

    Hot paths read the columns themselves; this is for readers and direct clients.
    """
    columns = step.intermediates
    last = {request_id: row for row, request_id in enumerate(columns.request_id)}
    ended = {detail.request_id for detail in step.details if detail.is_end}
    rows = zip(columns.request_id, columns.token_id, columns.logprob, strict=True)
    for row, (request_id, token_id, logprob) in enumerate(rows):
        yield Intermediate(request_id, Token(token_id, logprob), request_id in ended and last[request_id] == row)
