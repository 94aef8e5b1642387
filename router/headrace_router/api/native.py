"""TGI's native API: POST /generate, /generate_stream and /."""

from __future__ import annotations

from aiohttp import web

from headrace._common.errors import HeadraceError, InvalidRequest
from headrace_router import sse
from headrace_router.api import native_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.choices import check_count, end_of, run_all
from headrace_router.api.errors import native_event
from headrace_router.api.lasting import lasting, numbered, wants_ids
from headrace_router.api.native_replies import event, whole
from headrace_router.api.native_requests import Prepared, prepare
from headrace_router.api.timing import compute_headers, time_headers
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.types import Token


async def generate(request: web.Request) -> web.Response:
    """The whole answer as one JSON object."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.generate_decoder, service.settings.payload_limit)
        prepared = await _prepare(request, service, ticket, body.inputs, body.parameters)
        ticket.submitted()
        return await _whole(service, ticket, [prepared], len(body.inputs), as_list=False)


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """One event for each token."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.generate_decoder, service.settings.payload_limit)
        prepared = await _prepare(request, service, ticket, body.inputs, body.parameters, stream=True)
        return await _stream(request, service, ticket, prepared, len(body.inputs))


async def compat(request: web.Request) -> web.StreamResponse:
    """POST /: as /generate but a list, or as /generate_stream; the prompt is part of the text by default."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.compat_decoder, service.settings.payload_limit)
        return await answer_compat(request, service, ticket, body)


async def answer_compat(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.CompatBody
) -> web.StreamResponse:
    """The answer to a body of /."""
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    characters = sum(map(len, inputs))
    if body.stream:
        if len(inputs) != 1:
            raise InvalidRequest("several `inputs` are not supported when streaming tokens", "inputs")
        prepared = await _prepare(request, service, ticket, inputs[0], body.parameters, stream=True, full_text=True)
        return await _stream(request, service, ticket, prepared, characters)
    limit = service.limits.max_client_batch_size
    if not 0 < len(inputs) <= limit:
        raise InvalidRequest(f"`inputs` must be 1 to {limit} prompts. Given: {len(inputs)}", "inputs")
    check_count("inputs", len(inputs), service)
    made = [await _prepare(request, service, ticket, text, body.parameters, full_text=True) for text in inputs]
    ticket.submitted()
    return await _whole(service, ticket, made, characters, as_list=True)


async def _prepare(
    request: web.Request, service: Service, ticket: Ticket, inputs: str, parameters: shapes.Parameters | None, *,
    stream: bool = False, full_text: bool = False,
) -> Prepared:
    ticket.take()
    prepared = await prepare(service, inputs, parameters, request[CALLER], stream, full_text)
    ticket.take(len(prepared.requests) - 1)
    return prepared


async def _whole(
    service: Service, ticket: Ticket, made: list[Prepared], characters: int, as_list: bool
) -> web.Response:
    """The answers to some prompts."""
    choices = await run_all(service, ticket, [request for prepared in made for request in prepared.requests])
    outs, at = [], 0
    for prepared in made:
        outs.append(whole(service.text.tokenizer, prepared, choices[at : at + len(prepared.requests)]))
        at += len(prepared.requests)
    prompt_tokens = sum(len(prepared.requests[0].prompt) for prepared in made)
    headers = {
        **compute_headers(service, characters), **time_headers(ticket, [end_of(c) for c in choices], prompt_tokens)
    }
    body = shapes.encode(outs if as_list else outs[0])
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _stream(
    request: web.Request, service: Service, ticket: Ticket, prepared: Prepared, characters: int
) -> web.StreamResponse:
    ticket.submitted()
    wanted, tokenizer = prepared.requests[0], service.text.tokenizer
    index = 0

    def frames(_: int, token: Token) -> bytes:
        nonlocal index
        index += 1
        if token.end is not None:
            ticket.ended(wanted, token.end)
        return with_id(sse.frame(shapes.encode(event(tokenizer, prepared, index, token))))

    ids = wants_ids(request, default=True)
    async with lasting(service, service.engine.submit(wanted), ids) as stream:
        with_id = numbered(stream)
        events = await sse.open_stream(request, compute_headers(service, characters))
        try:
            await events.relay([stream], frames)
            last = b""
        except HeadraceError as error:
            ticket.fail(error)
            last = native_event(error)
        return await events.end(last)
