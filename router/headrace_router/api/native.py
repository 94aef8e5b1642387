"""TGI's native API: POST /generate, /generate_stream, / and /tokenize."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET

from headrace._common.errors import HeadraceError, InvalidRequest
from headrace_router import sse
from headrace_router.api import native_types as shapes
from headrace_router.api.bodies import read_json
from headrace_router.api.caller import CALLER
from headrace_router.api.errors import event
from headrace_router.api.native_requests import Prepared, prepare
from headrace_router.api.timing import compute_headers, time_headers
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.text.pieces import token_text
from headrace_router.types import Token, TopToken


async def generate(request: web.Request) -> web.Response:
    """The whole answer as one JSON object."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.generate_decoder, service.settings.payload_limit)
        return await _generate(request, service, ticket, body, as_list=False, full_text=False)


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """One event for each token."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.generate_decoder, service.settings.payload_limit)
        return await _stream(request, service, ticket, body, full_text=False)


async def compat(request: web.Request) -> web.StreamResponse:
    """POST /: as /generate but a list of one, or as /generate_stream; the prompt is part of the text by default."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, shapes.compat_decoder, service.settings.payload_limit)
        if body.stream:
            return await _stream(request, service, ticket, body, full_text=True)
        return await _generate(request, service, ticket, body, as_list=True, full_text=True)


async def tokenize(request: web.Request) -> web.Response:
    """Tokens of `inputs` with offsets in characters."""
    service = request.app[SERVICE]
    body = await read_json(request, shapes.generate_decoder, service.settings.payload_limit)
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty", "inputs")
    text, inputs = service.text, body.inputs
    out = await text.run(lambda: shapes.encode(shapes.simple_tokens(text.tokenizer.pieces(inputs))))
    return web.Response(body=out, content_type="application/json")


async def _prepare(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.GenerateBody, stream: bool, full_text: bool
) -> Prepared:
    ticket.take()
    prepared = await prepare(service, body, request[CALLER], stream, full_text)
    ticket.submitted()
    return prepared


async def _generate(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.GenerateBody, as_list: bool, full_text: bool
) -> web.Response:
    prepared = await _prepare(request, service, ticket, body, False, full_text)
    async with service.engine.submit(prepared.request) as stream:
        tokens = [token async for token in stream]
    end = tokens[-1].end
    assert end is not None
    ticket.ended(prepared.request, end)
    text = prepared.prompt_text + end.text
    out = shapes.GenerateOut(text, _details(service, tokens) if prepared.details else UNSET)
    headers = {**compute_headers(service, len(body.inputs)), **time_headers(ticket, [end])}
    return web.Response(body=shapes.encode([out] if as_list else out), content_type="application/json", headers=headers)


async def _stream(
    request: web.Request, service: Service, ticket: Ticket, body: shapes.GenerateBody, full_text: bool
) -> web.StreamResponse:
    prepared = await _prepare(request, service, ticket, body, True, full_text)
    index = 0

    def frames(_: int, token: Token) -> bytes:
        nonlocal index
        index += 1
        if token.end is not None:
            ticket.ended(prepared.request, token.end)
        return sse.frame(shapes.encode(_event(service, prepared, index, token)))

    async with service.engine.submit(prepared.request) as stream:
        events = await sse.open_stream(request, compute_headers(service, len(body.inputs)))
        try:
            await events.relay([stream], frames)
            last = b""
        except HeadraceError as error:
            ticket.fail(error)
            last = event(request.path, error)
    return await events.end(last)


def _token(service: Service, token: Token) -> shapes.TokenOut:
    """A special token shows as it is written; it adds nothing to the text."""
    text = token_text(service.text.tokenizer, token.id) if token.special else token.text
    return shapes.TokenOut(token.id, text, token.logprob, token.special)


def _top(service: Service, top: list[TopToken]) -> list[shapes.TokenOut]:
    tokenizer = service.text.tokenizer
    return [shapes.TokenOut(t.id, token_text(tokenizer, t.id), t.logprob, t.id in tokenizer.special_ids) for t in top]


def _event(service: Service, prepared: Prepared, index: int, token: Token) -> shapes.StreamOut:
    out = shapes.StreamOut(index, _token(service, token), None, None)
    if token.top:
        out.top_tokens = _top(service, token.top)
    if (end := token.end) is not None:
        out.generated_text = prepared.prompt_text + end.text
        if prepared.details:
            out.details = shapes.StreamDetailsOut(end.finish_reason, end.generated_tokens, end.seed, end.input_length)
    return out


def _details(service: Service, tokens: list[Token]) -> shapes.DetailsOut:
    end, tokenizer = tokens[-1].end, service.text.tokenizer
    assert end is not None
    prompt = next((token.prompt for token in tokens if token.prompt is not None), [])
    top = [_top(service, token.top) for token in tokens if token.top]
    return shapes.DetailsOut(
        finish_reason=end.finish_reason, generated_tokens=end.generated_tokens, seed=end.seed,
        prefill=[shapes.PrefillOut(p.id, token_text(tokenizer, p.id), p.logprob) for p in prompt],
        tokens=[_token(service, token) for token in tokens], top_tokens=top or UNSET,
    )
