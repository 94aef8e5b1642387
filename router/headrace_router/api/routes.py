"""Every route: who answers, and what goes in and comes out. The application and the OpenAPI document are made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from headrace._common.errors import (
    BodyTooLarge,
    BrokerUnavailable,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    GenerationFailed,
    Gone,
    HeadraceError,
    Incomplete,
    InvalidRequest,
    MalformedBody,
    ModelNotFound,
    NoCapacity,
    NotFound,
    Overloaded,
    QueueFull,
    RateLimited,
    TemplateError,
    TooSlow,
    Unauthorized,
    Unhealthy,
    UnsupportedMediaType,
    WouldBeLate,
)
from headrace_router.api import (
    admin,
    admin_types,
    clouds,
    docs,
    messages,
    messages_types,
    native,
    native_types,
    openai,
    openai_types,
    requests,
    responses,
    responses_types,
    tokens,
    workers,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_ERRORS: tuple[type[HeadraceError], ...] = (
    MalformedBody, UnsupportedMediaType, BodyTooLarge, TooSlow, InvalidRequest, Unauthorized, Forbidden, RateLimited,
)
RUN_ERRORS: tuple[type[HeadraceError], ...] = (
    *BODY_ERRORS, Overloaded, QueueFull, NoCapacity, BrokerUnavailable, WouldBeLate, DeadlineExceeded, GenerationFailed,
    Incomplete, Unhealthy,
)


@dataclass(frozen=True)
class Route:
    """One method of one path. A POST route needs a key where keys are set; GET routes are open.

    `body`, `reply` and `events` are types, or tuples of types that are possible.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    reply: Any = None  # JSON of that kind; None: an answer without a body
    events: Any = None  # what each Server-Sent Event holds, if the answer may be a stream
    errors: tuple[type[HeadraceError], ...] = ()
    media: str = "application/json"  # of the reply
    own: bool = False  # shows what belongs to a tenant, whatever the method
    status: int = 200  # of the answer that is no error
    named: bool = False  # events have names, and nothing follows the last one
    public: bool = False  # needs no API key, though it is a POST

    @property
    def keyed(self) -> bool:
        """Does it need an API key where keys are set?"""
        return (self.method == "POST" and not self.public) or self.own


ROUTES = (
    Route(
        "POST", "/generate", native.generate, "Generate text", native_types.GenerateBody, native_types.GenerateOut,
        errors=RUN_ERRORS,
    ),
    Route(
        "POST", "/generate_stream", native.generate_stream, "Generate text as a stream of tokens",
        native_types.GenerateBody, events=native_types.StreamOut, errors=RUN_ERRORS,
    ),
    Route(
        "POST", "/", native.compat, "Generate text, as a list of one or, with `stream`, as /generate_stream",
        native_types.CompatBody, list[native_types.GenerateOut], native_types.StreamOut, RUN_ERRORS,
    ),
    Route(
        "POST", "/invocations", clouds.invocations, "SageMaker's route: /, chat or completions, by the shape of the body",
        (native_types.CompatBody, openai_types.ChatBody, openai_types.CompletionBody),
        (list[native_types.GenerateOut], openai_types.ChatReply, openai_types.CompletionReply),
        (native_types.StreamOut, openai_types.ChatChunk, openai_types.CompletionChunk), (*RUN_ERRORS, TemplateError),
    ),
    Route(
        "POST", "/vertex", clouds.vertex, "Vertex AI's route: the texts of several instances", clouds.VertexBody,
        clouds.Predictions, errors=(*RUN_ERRORS, TemplateError),
    ),
    Route(
        "POST", "/tokenize", tokens.tokenize, "Tokens of a text or of a conversation", tokens.TokenizeBody,
        (list[native_types.SimpleToken], tokens.Tokenized), errors=(*BODY_ERRORS, TemplateError),
    ),
    Route(
        "POST", "/detokenize", tokens.detokenize, "The text of tokens", tokens.DetokenizeBody, tokens.Detokenized,
        errors=BODY_ERRORS,
    ),
    Route(
        "POST", "/chat_tokenize", tokens.chat_tokenize, "The prompt that a conversation becomes, and its tokens",
        openai_types.ChatPrompt, tokens.ChatTokenized, errors=(*BODY_ERRORS, TemplateError),
    ),
    Route(
        "POST", "/v1/chat/completions", openai.chat_completions, "OpenAI's chat completions", openai_types.ChatBody,
        openai_types.ChatReply, openai_types.ChatChunk, (*RUN_ERRORS, TemplateError),
    ),
    Route(
        "POST", "/v1/completions", openai.completions, "OpenAI's completions", openai_types.CompletionBody,
        openai_types.CompletionReply, openai_types.CompletionChunk, RUN_ERRORS,
    ),
    Route(
        "POST", "/v1/requests", requests.create, "Of a gateway: take a request that runs whoever listens",
        native_types.GenerateBody, requests.Accepted, errors=(*RUN_ERRORS, NotFound, Conflict), status=202,
    ),
    Route(
        "GET", "/v1/requests/{id}", requests.show, "Of a gateway: the state of a request", reply=requests.RequestOut,
        errors=(Unauthorized, NotFound, Gone), own=True,
    ),
    Route(
        "GET", "/v1/requests/{id}/events", requests.events,
        "Of a gateway: a request's events, from the one after Last-Event-ID", events=requests.EVENTS,
        errors=(InvalidRequest, Unauthorized, NotFound, Gone), own=True,
    ),
    Route(
        "DELETE", "/v1/requests/{id}", requests.delete, "Of a gateway: give a request up",
        errors=(Unauthorized, NotFound, Gone), own=True, status=204,
    ),
    Route(
        "GET", "/v1/workers", workers.workers, "Of a gateway: the workers that are connected", reply=workers.WorkersOut,
        errors=(NotFound,),
    ),
    Route(
        "POST", "/v1/worker/register", workers.register, "Of a gateway that is open to strangers: a token for a new worker",
        reply=workers.Registered, errors=(NotFound, Forbidden, RateLimited), status=201, public=True,
    ),
    Route(
        "GET", "/workers", workers.page, "Of a gateway: the same as a page, which keeps itself up to date", reply=str,
        media="text/html", errors=(NotFound,),
    ),
    Route(
        "GET", "/v1/worker/connect", workers.connect, "Of a gateway: the WebSocket that a worker dials; see docs/network.md",
        errors=(Unauthorized, NotFound), status=101,
    ),
    Route(
        "POST", "/v1/responses", responses.responses, "OpenAI's responses, without state", responses_types.ResponseBody,
        responses_types.Response, responses_types.AnyEvent, (*RUN_ERRORS, TemplateError), named=True,
    ),
    Route(
        "POST", "/v1/messages", messages.messages, "Anthropic's messages", messages_types.MessageBody,
        messages_types.MessageReply, messages_types.AnyEvent, (*RUN_ERRORS, TemplateError), named=True,
    ),
    Route(
        "POST", "/v1/messages/count_tokens", messages.count_tokens, "Tokens of the prompt of a message",
        messages_types.CountBody, messages_types.Counted, errors=(*BODY_ERRORS, TemplateError),
    ),
    Route("GET", "/v1/models", admin.models, "The model that is served, as OpenAI lists it", reply=admin_types.ModelsOut),
    Route(
        "GET", "/v1/models/{model:.+}", admin.model, "The model by its name", reply=admin_types.ModelOut,
        errors=(ModelNotFound,),
    ),
    Route("GET", "/info", admin.info, "The model and the limits of the service", reply=admin_types.Info),
    Route("GET", "/health", admin.health, "200 while the service is well, however busy", errors=(Unhealthy,)),
    Route("GET", "/", admin.health, "As /health", errors=(Unhealthy,)),
    Route("GET", "/ping", admin.health, "As /health", errors=(Unhealthy,)),
    Route("GET", "/ready", admin.ready, "200 while new requests are welcome", errors=(Unhealthy,)),
    Route("GET", "/metrics", admin.metrics, "Prometheus' text format", reply=str, media="text/plain"),
    Route("GET", "/openapi.json", docs.document, "This document", reply=dict[str, Any]),
    Route("GET", "/api-doc/openapi.json", docs.document, "This document, where TGI has it", reply=dict[str, Any]),
    Route("GET", "/docs", docs.page, "This document as a page", reply=str, media="text/html"),
)
