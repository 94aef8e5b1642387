"""OpenAI's API for agents: POST /v1/responses, without the state that OpenAI keeps between calls."""

from __future__ import annotations

from aiohttp import web

from headrace._common.errors import InvalidRequest
from headrace_router.api import responses_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.chat_requests import prepare_chat
from headrace_router.api.openai import answer_prepared
from headrace_router.api.responses_replies import ResponseReplies
from headrace_router.api.responses_requests import as_chat
from headrace_router.service import SERVICE, Ticket
from headrace_router.validation import Rules

RULES = Rules("max_output_tokens", "input")
# what a chat calls what this route calls otherwise
RENAMED = {"response_format": "text.format", "messages": "input"}


async def responses(request: web.Request) -> web.StreamResponse:
    """A response, answered whole or as a stream of events."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.decoder, service.settings.payload_limit)
        ticket.take()
        chat = as_chat(body)
        try:
            prepared = await prepare_chat(service, chat, request[CALLER], RULES)
        except InvalidRequest as error:
            raise renamed(error, RENAMED) from None
        return await answer_prepared(request, service, ticket, prepared, ResponseReplies(service, prepared, body))


def renamed(error: InvalidRequest, names: dict[str, str]) -> InvalidRequest:
    """A refusal in the words of another API. `names`: its fields, by what a chat calls them."""
    text, field = str(error), error.field
    for old, new in names.items():
        text = text.replace(f"`{old}", f"`{new}")
        field = new if field == old else field
    return InvalidRequest(text, field, error.code)
