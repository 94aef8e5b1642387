"""Several choices for one prompt: the requests that make them, how they run, and which of them are the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack

from headrace._common.errors import InvalidRequest
from headrace_router.merge import merge
from headrace_router.service import Service, Ticket
from headrace_router.types import End, GenerateRequest, Token


def spread(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """`count` requests alike but for their seeds: the request's own, and the numbers that follow it."""
    seed = request.sampling.seed
    if seed is None:
        return [request] * count
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=(seed + k) % 2**64))
        for k in range(count)
    ]


def check_count(field: str, count: int, service: Service) -> None:
    """
    Raises:
        InvalidRequest: a call asks for so many requests that there would never be room for it.
    """
    limit = service.settings.max_concurrent_requests
    if count > limit:
        raise InvalidRequest(f"`{field}` makes {count} requests of one call, the limit is {limit}", field)


async def run_all(service: Service, ticket: Ticket, requests: Sequence[GenerateRequest]) -> list[list[Token]]:
    """The tokens of each request. All are cancelled when one fails or the caller is.

    Raises:
        HeadraceError: one of them failed.
    """
    made: list[list[Token]] = [[] for _ in requests]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(service.engine.submit(request)) for request in requests]
        async for tokens in merge(streams):
            for index, token in tokens:
                made[index].append(token)
                if token.end is not None:
                    ticket.ended(requests[index], token.end)
    return made


def end_of(tokens: Sequence[Token]) -> End:
    """The end of a request that has ended well."""
    end = tokens[-1].end
    assert end is not None
    return end


def ranked(choices: Sequence[Sequence[Token]]) -> list[int]:
    """Places of the choices, the one with the highest mean log probability per token first."""
    means = [sum(token.logprob for token in tokens) / len(tokens) for tokens in choices]
    return sorted(range(len(choices)), key=lambda at: -means[at])
