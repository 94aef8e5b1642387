"""Errors as HTTP answers: TGI's flat body on native routes, OpenAI's envelope on /v1, Anthropic's on /v1/messages."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from headrace._common.errors import (
    GenerationFailed,
    HeadraceError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    RateLimited,
    TooSlow,
    Unauthorized,
    mapping,
)
from headrace_router import sse

NATIVE_PREFIXES: dict[type[HeadraceError], str] = {
    InvalidRequest: "Input validation error: ", GenerationFailed: "Request failed during generation: ",
}

ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}


def is_openai(path: str) -> bool:
    """Does this route speak OpenAI's API, or Anthropic's, which has the same statuses?"""
    return path.startswith("/v1/")


def is_anthropic(path: str) -> bool:
    """Does this route speak Anthropic's API?"""
    return path.startswith("/v1/messages")


def native_body(error: HeadraceError) -> dict[str, Any]:
    """`{"error", "error_type"}`, with TGI's words before the message."""
    prefix = next((text for kind, text in NATIVE_PREFIXES.items() if isinstance(error, kind)), "")
    return {"error": f"{prefix}{error}", "error_type": mapping(error).native}


def openai_body(error: HeadraceError) -> dict[str, Any]:
    """OpenAI's error envelope."""
    field = error.field if isinstance(error, InvalidRequest) else None
    code = error.code if isinstance(error, InvalidRequest) else None
    if isinstance(error, Unauthorized):
        code = "invalid_api_key"
    elif isinstance(error, RateLimited):
        code = "rate_limit_exceeded"
    elif isinstance(error, ModelNotFound):
        field, code = "model", "model_not_found"
    return {"error": {"message": str(error), "type": mapping(error).openai, "param": field, "code": code}}


def anthropic_body(error: HeadraceError) -> dict[str, Any]:
    """Anthropic's error envelope (https://docs.anthropic.com/en/api/errors)."""
    status = mapping(error).openai_http or mapping(error).http
    made: dict[str, Any] = {"type": ANTHROPIC.get(status, "api_error"), "message": str(error)}
    if isinstance(error, InvalidRequest) and error.code is not None:
        made["details"] = {"error_code": error.code}
    return {"type": "error", "error": made}


def answer(path: str, error: HeadraceError) -> web.Response:
    """The whole HTTP answer."""
    row = mapping(error)
    if is_openai(path):
        status = row.openai_http or row.http
        body = anthropic_body(error) if is_anthropic(path) else openai_body(error)
    else:
        status, body = row.http, native_body(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
    made = web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )
    if isinstance(error, TooSlow):
        made.force_close()  # what is left of the body is not waited for
    return made


def from_http(error: web.HTTPException) -> HeadraceError | None:
    """aiohttp's own refusals as errors of ours; None for what is no error or has no row."""
    if error.status == 404:
        return NotFound("there is no such route")
    if error.status == 405:
        return MethodNotAllowed("this route exists, for another method")
    return None


def native_event(error: HeadraceError) -> bytes:
    """The last event of a native stream that fails."""
    return sse.frame(msgspec.json.encode(native_body(error)))


def openai_event(error: HeadraceError) -> bytes:
    """The last event of a stream of OpenAI's API that fails, and the end mark."""
    return sse.frame(msgspec.json.encode(openai_body(error))) + sse.DONE


def anthropic_event(error: HeadraceError) -> bytes:
    """The last event of a stream of Anthropic's API that fails."""
    return sse.frame(msgspec.json.encode(anthropic_body(error)), "error")


def _response_event(error: HeadraceError) -> bytes:
    """What ends a stream of OpenAI's responses when nothing is left that could say how the response has failed."""
    detail = openai_body(error)["error"]
    made = {"type": "error", "code": detail["type"], "message": detail["message"], "param": detail["param"]}
    return sse.frame(msgspec.json.encode({**made, "sequence_number": 0}), "error")


def event(path: str, error: HeadraceError) -> bytes:
    """The last event of a stream that fails, as the route has it."""
    if is_anthropic(path):
        return anthropic_event(error)
    if path == "/v1/responses":
        return _response_event(error)
    return openai_event(error) if is_openai(path) else native_event(error)
