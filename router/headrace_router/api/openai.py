"""OpenAI's API: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Protocol

from aiohttp import web

from headrace._common.errors import HeadraceError
from headrace_router import sse
from headrace_router.api import openai_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.chat_replies import ChatReplies
from headrace_router.api.chat_requests import prepare_chat
from headrace_router.api.choices import end_of, run_all
from headrace_router.api.completion_replies import CompletionReplies
from headrace_router.api.completion_requests import prepare_completion
from headrace_router.api.lasting import lasting, numbered, wants_ids
from headrace_router.api.openai_replies import usage
from headrace_router.api.openai_requests import Prepared
from headrace_router.api.timing import compute_headers, time_headers
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.types import End, Token


class Answers(Protocol):
    """How an API writes what came of a call."""

    def frames(self, index: int, token: Token) -> bytes:
        """The events of one token of a choice."""

    def last_frames(self, ends: list[End]) -> bytes:
        """The end of a stream. `ends`: by request."""

    def error_frames(self, error: HeadraceError) -> bytes:
        """The end of a stream that fails."""

    def whole(self, choices: list[list[Token]]) -> bytes:
        """The answer of a call that does not stream."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """A chat, answered whole or as a stream."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.chat_decoder, service.settings.payload_limit)
        return await answer_chat(request, service, ticket, body)


async def completions(request: web.Request) -> web.StreamResponse:
    """One or several raw prompts, answered whole or as a stream whose chunks interleave."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.completion_decoder, service.settings.payload_limit)
        return await answer_completion(request, service, ticket, body)


async def answer_chat(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.ChatBody
) -> web.StreamResponse:
    """The answer to a body of /v1/chat/completions."""
    ticket.take()
    prepared = await prepare_chat(service, body, request[CALLER])
    return await answer_prepared(request, service, ticket, prepared, ChatReplies(service, prepared))


async def answer_completion(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.CompletionBody
) -> web.StreamResponse:
    """The answer to a body of /v1/completions."""
    ticket.take()
    prepared = await prepare_completion(service, body, request[CALLER])
    return await answer_prepared(request, service, ticket, prepared, CompletionReplies(service, prepared))


async def answer_prepared(
    request: web.Request, service: Service, ticket: Ticket, prepared: Prepared, replies: Answers
) -> web.StreamResponse:
    """The answer to a call that is checked."""
    ticket.take(len(prepared.requests) - 1)
    ticket.submitted()
    headers = compute_headers(service, prepared.characters)
    if prepared.shown.stream:
        return await _stream(request, service, ticket, prepared, replies, headers)
    choices = await run_all(service, ticket, prepared.requests)
    ends = [end_of(tokens) for tokens in choices]
    times = time_headers(ticket, ends, usage(prepared, ends).prompt_tokens)
    return web.Response(body=replies.whole(choices), content_type="application/json", headers={**headers, **times})


async def _stream(
    request: web.Request, service: Service, ticket: Ticket, prepared: Prepared, replies: Answers, headers: dict[str, str]
) -> web.StreamResponse:
    ids = wants_ids(request, default=False) and len(prepared.requests) == 1  # ids of one choice say nothing of another
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(lasting(service, service.engine.submit(r), ids)) for r in prepared.requests]
        with_id = numbered(streams[0])
        ends: dict[int, End] = {}

        def frames(index: int, token: Token) -> bytes:
            if token.end is not None:
                ends[index] = token.end
                ticket.ended(prepared.requests[index], token.end)
            return with_id(replies.frames(index, token))

        events = await sse.open_stream(request, headers)
        try:
            await events.relay(streams, frames)
            in_order = [ends[index] for index in sorted(ends)]
            last = replies.last_frames(in_order)
        except HeadraceError as error:
            ticket.fail(error)
            last = replies.error_frames(error)
        return await events.end(last)
