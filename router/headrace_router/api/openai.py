"""OpenAI's API: POST /v1/chat/completions and /v1/completions, and TGI's /chat_tokenize."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aiohttp import web

from headrace._common.errors import HeadraceError
from headrace_router import sse
from headrace_router.api import native_types
from headrace_router.api import openai_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.errors import event
from headrace_router.api.openai_replies import ChatReplies, CompletionReplies
from headrace_router.api.openai_requests import Prepared, check_messages, prepare_chat, prepare_completion
from headrace_router.api.timing import compute_headers, time_headers
from headrace_router.merge import merge
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.types import End, Token


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """A chat, answered whole or as a stream."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.chat_decoder, service.settings.payload_limit)
        ticket.take()
        prepared = await prepare_chat(service, body, request[CALLER])
        return await _answer(request, service, ticket, prepared, ChatReplies(service, prepared.shown.logprobs))


async def completions(request: web.Request) -> web.StreamResponse:
    """One or several raw prompts, answered whole or as a stream whose chunks interleave."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.completion_decoder, service.settings.payload_limit)
        ticket.take()
        prepared = await prepare_completion(service, body, request[CALLER])
        ticket.take(len(prepared.requests) - 1)
        return await _answer(request, service, ticket, prepared, CompletionReplies(service, body.logprobs))


async def chat_tokenize(request: web.Request) -> web.Response:
    """The text that the template makes of a conversation, and its tokens."""
    service = request.app[SERVICE]
    body = await read_json(request, shapes.chat_tokenize_decoder, service.settings.payload_limit)
    prompt = await service.text.chat(check_messages(body.messages))

    def answer() -> bytes:
        tokens = native_types.simple_tokens(service.text.chat_pieces(prompt))
        return shapes.encode({"tokenize_response": tokens, "templated_text": prompt.text})

    return web.Response(body=await service.text.run(answer), content_type="application/json")


async def _answer(
    request: web.Request, service: Service, ticket: Ticket, prepared: Prepared, replies: ChatReplies | CompletionReplies
) -> web.StreamResponse:
    ticket.submitted()
    headers = compute_headers(service, prepared.characters)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(service.engine.submit(r)) for r in prepared.requests]
        if prepared.shown.stream:
            ends: list[End] = []

            def frames(index: int, token: Token) -> bytes:
                if token.end is not None:
                    ends.extend(_ended(ticket, prepared, [(index, token)]))
                return replies.frames(index, token)

            events = await sse.open_stream(request, headers)
            try:
                await events.relay(streams, frames)
                last = (replies.usage_frame(ends) if prepared.shown.include_usage else b"") + sse.DONE
            except HeadraceError as error:
                ticket.fail(error)
                last = event(request.path, error)
            return await events.end(last)
        choices: list[list[Token]] = [[] for _ in streams]
        async for tokens in merge(streams):
            _ended(ticket, prepared, tokens)
            for index, token in tokens:
                choices[index].append(token)
    ends = [end for tokens_of in choices if (end := tokens_of[-1].end) is not None]
    return web.Response(
        body=replies.whole(choices, ends), content_type="application/json",
        headers={**headers, **time_headers(ticket, ends)},
    )


def _ended(ticket: Ticket, prepared: Prepared, tokens: list[tuple[int, Token]]) -> list[End]:
    """Count the choices that end with these tokens."""
    ends = []
    for index, token in tokens:
        if token.end is not None:
            ticket.ended(prepared.requests[index], token.end)
            ends.append(token.end)
    return ends
