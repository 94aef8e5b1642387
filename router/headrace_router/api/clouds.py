"""How clouds call a model: SageMaker's POST /invocations and Vertex AI's POST /vertex, as TGI answers them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from headrace._common.errors import InvalidRequest
from headrace_router.api import native_types, openai_types
from headrace_router.api.bodies import decode, read_body, read_json
from headrace_router.api.caller import CALLER, Caller
from headrace_router.api.chat_requests import prepare_chat
from headrace_router.api.choices import check_count, end_of, run_all
from headrace_router.api.native import answer_compat
from headrace_router.api.native_requests import prepare
from headrace_router.api.openai import answer_chat, answer_completion
from headrace_router.service import SERVICE, Service, Ticket
from headrace_router.types import GenerateRequest


class _Shape(Struct):
    """The members that tell bodies apart."""

    inputs: msgspec.Raw | UnsetType = UNSET
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET


class VertexBody(Struct):
    """Body of /vertex: each instance is a body of / or of /v1/chat/completions."""

    instances: Annotated[list[msgspec.Raw], native_types.SomeOf]


class Predictions(Struct):
    """Answer of /vertex: the text of each instance."""

    predictions: list[str]


_shape_decoder = msgspec.json.Decoder(_Shape)
_vertex_decoder = msgspec.json.Decoder(VertexBody)


async def invocations(request: web.Request) -> web.StreamResponse:
    """What /, /v1/chat/completions or /v1/completions answers, by the shape of the body."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        raw = await read_body(request, service.settings.payload_limit)
        shape = decode(_shape_decoder, raw)
        if shape.inputs is not UNSET:
            return await answer_compat(request, service, ticket, decode(native_types.compat_decoder, raw))
        if shape.messages is not UNSET:
            return await answer_chat(request, service, ticket, decode(openai_types.chat_decoder, raw))
        if shape.prompt is not UNSET:
            return await answer_completion(request, service, ticket, decode(openai_types.completion_decoder, raw))
        raise InvalidRequest("one of `inputs`, `messages` and `prompt` is needed", "inputs")


async def vertex(request: web.Request) -> web.Response:
    """The texts of several instances, all of them sampled."""
    service = request.app[SERVICE]
    with Ticket(service) as ticket:
        body = await read_json(request, _vertex_decoder, service.settings.payload_limit)
        if not body.instances:
            raise InvalidRequest("`instances` cannot be empty", "instances")
        check_count("instances", len(body.instances), service)
        ticket.take(len(body.instances))
        requests = [await _instance(service, bytes(raw), request[CALLER]) for raw in body.instances]
        ticket.submitted()
        choices = await run_all(service, ticket, requests)
    made = Predictions([end_of(tokens).text for tokens in choices])
    return web.Response(body=msgspec.json.encode(made), content_type="application/json")


async def _instance(service: Service, raw: bytes, caller: Caller) -> GenerateRequest:
    if decode(_shape_decoder, raw).messages is not UNSET:
        chat = decode(openai_types.chat_decoder, raw)
        chat.stream, chat.stream_options, chat.n, chat.best_of = None, None, None, None
        return (await prepare_chat(service, chat, caller)).requests[0]
    body = decode(native_types.generate_decoder, raw)
    parameters = body.parameters or native_types.Parameters()
    parameters.do_sample, parameters.best_of = True, None
    return (await prepare(service, body.inputs, parameters, caller, stream=False, full_text=False)).requests[0]
