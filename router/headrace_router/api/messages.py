"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web

from headrace._common.errors import InvalidRequest
from headrace_router.api import messages_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.chat_requests import encode_chat, prepare_chat
from headrace_router.api.messages_replies import MessageReplies
from headrace_router.api.messages_requests import as_chat, as_prompt
from headrace_router.api.openai import answer_prepared
from headrace_router.api.responses import renamed
from headrace_router.api.tools import tool_use
from headrace_router.service import SERVICE, Ticket
from headrace_router.validation import CHAT

RENAMED = {"stop": "stop_sequences", "response_format": "output_config.format"}


async def messages(request: web.Request) -> web.StreamResponse:
    """A message, answered whole or as a stream of events."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.decoder, service.settings.payload_limit)
        ticket.take()
        try:
            prepared = await prepare_chat(service, as_chat(body), request[CALLER], CHAT)
        except InvalidRequest as error:
            raise renamed(error, RENAMED) from None
        return await answer_prepared(request, service, ticket, prepared, MessageReplies(service, prepared))


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a message has."""
    service = request.app[SERVICE]
    body = await read_json(request, shapes.count_decoder, service.settings.payload_limit)
    chat = as_prompt(body)
    use = tool_use(chat)
    prompt = await encode_chat(service, chat, functions=use.functions if use is not None else ())
    return web.Response(body=shapes.encode(shapes.Counted(len(prompt.ids))), content_type="application/json")
