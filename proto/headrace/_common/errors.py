"""Typed errors, and the one table that says what each becomes on HTTP, on gRPC and in a process's exit status."""

from __future__ import annotations

from dataclasses import dataclass


class HeadraceError(Exception):
    """Base of every error with a meaning for a client or operator; `str(error)` is the message they read."""

    retry_after: float | None = None  # seconds after which the same request may succeed, where that can be said


class InvalidRequest(HeadraceError):
    """Bad input: names the field, the value and the limit. `field` is the parameter at fault, if one is."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class AlreadyExists(InvalidRequest):
    """A request id is used twice within one batch."""


class MalformedBody(HeadraceError):
    """The HTTP body is not JSON."""


class UnsupportedMediaType(HeadraceError):
    """The HTTP body is not declared as JSON."""


class BodyTooLarge(HeadraceError):
    """The HTTP body is over the payload limit."""


class UriTooLong(HeadraceError):
    """The first line of the HTTP request is too long."""


class HeadersTooLarge(HeadraceError):
    """An HTTP header is too long, or there are too many."""


class TooSlow(HeadraceError):
    """The client takes too long to send its HTTP request."""


class NotFound(HeadraceError):
    """An unknown batch, route or model."""


class Gone(HeadraceError):
    """The request has ended so long ago that nothing is kept of it."""


class Conflict(HeadraceError):
    """The idempotency key was used before, for another request."""


class ModelNotFound(NotFound):
    """The model that is asked about is not served."""


class MethodNotAllowed(HeadraceError):
    """The route exists, for another HTTP method."""


class Unauthorized(HeadraceError):
    """No valid API key."""


class Forbidden(HeadraceError):
    """The API key is valid, but does not allow this."""


class Overloaded(HeadraceError):
    """No room now; the same request may succeed later. `reason` is a metric's label."""

    reason = "overloaded"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Overloaded):
    """As many requests wait as may."""

    reason = "queue"


class NoCapacity(QueueFull):
    """Nobody is there who could ever serve the request."""

    reason = "no_capacity"


class WouldBeLate(QueueFull):
    """So many wait that a request cannot meet its deadline."""

    reason = "deadline"


class BrokerUnavailable(QueueFull):
    """What keeps a gateway's requests does not answer."""

    reason = "broker"


class RateLimited(Overloaded):
    """A tenant has used what it may; `reason`: requests, tokens or concurrency."""

    def __init__(self, message: str, reason: str = "requests", retry_after: float | None = None) -> None:
        super().__init__(message, retry_after)
        self.reason = reason


class DeadlineExceeded(HeadraceError):
    """The time that the client gave has passed."""


class TemplateError(HeadraceError):
    """There is no chat template, or it refused the conversation or failed."""


class GenerationFailed(HeadraceError):
    """The shard failed, or ended the request with an error."""


class Incomplete(HeadraceError):
    """The stream of an accepted request ended without its last token."""


class Unhealthy(HeadraceError):
    """The service cannot serve now."""


class StartupError(HeadraceError):
    """The process cannot start; the message is the one line that the operator reads."""


@dataclass(frozen=True)
class Mapping:
    """What one kind of error becomes. `native` is TGI's error_type, `openai` the type in OpenAI's envelope."""

    http: int
    grpc: str
    native: str
    openai: str
    openai_http: int | None = None  # where /v1 answers with another status than the native routes


TABLE: dict[type[HeadraceError], Mapping] = {
    AlreadyExists: Mapping(422, "ALREADY_EXISTS", "validation", "invalid_request_error", 400),
    InvalidRequest: Mapping(422, "INVALID_ARGUMENT", "validation", "invalid_request_error", 400),
    MalformedBody: Mapping(400, "INVALID_ARGUMENT", "validation", "invalid_request_error"),
    UnsupportedMediaType: Mapping(415, "INVALID_ARGUMENT", "validation", "invalid_request_error"),
    BodyTooLarge: Mapping(413, "RESOURCE_EXHAUSTED", "validation", "invalid_request_error"),
    UriTooLong: Mapping(414, "INVALID_ARGUMENT", "validation", "invalid_request_error"),
    HeadersTooLarge: Mapping(431, "INVALID_ARGUMENT", "validation", "invalid_request_error"),
    TooSlow: Mapping(408, "DEADLINE_EXCEEDED", "timeout", "timeout_error"),
    NotFound: Mapping(404, "NOT_FOUND", "not_found", "invalid_request_error"),
    ModelNotFound: Mapping(404, "NOT_FOUND", "not_found", "invalid_request_error"),
    Gone: Mapping(410, "NOT_FOUND", "gone", "invalid_request_error"),
    Conflict: Mapping(409, "ALREADY_EXISTS", "conflict", "invalid_request_error"),
    MethodNotAllowed: Mapping(405, "UNIMPLEMENTED", "method_not_allowed", "invalid_request_error"),
    Unauthorized: Mapping(401, "UNAUTHENTICATED", "authentication", "invalid_request_error"),
    Forbidden: Mapping(403, "PERMISSION_DENIED", "permission", "permission_error"),
    Overloaded: Mapping(429, "RESOURCE_EXHAUSTED", "overloaded", "overloaded_error"),
    QueueFull: Mapping(503, "UNAVAILABLE", "overloaded", "overloaded_error"),
    NoCapacity: Mapping(503, "UNAVAILABLE", "overloaded", "overloaded_error"),
    BrokerUnavailable: Mapping(503, "UNAVAILABLE", "overloaded", "overloaded_error"),
    WouldBeLate: Mapping(503, "UNAVAILABLE", "overloaded", "overloaded_error"),
    RateLimited: Mapping(429, "RESOURCE_EXHAUSTED", "rate_limited", "rate_limit_error"),
    DeadlineExceeded: Mapping(408, "DEADLINE_EXCEEDED", "timeout", "timeout_error"),
    TemplateError: Mapping(422, "INVALID_ARGUMENT", "template_error", "invalid_request_error", 400),
    GenerationFailed: Mapping(424, "INTERNAL", "generation", "server_error", 500),
    Incomplete: Mapping(500, "INTERNAL", "incomplete_generation", "server_error"),
    Unhealthy: Mapping(503, "UNAVAILABLE", "healthcheck", "server_error"),
    StartupError: Mapping(500, "FAILED_PRECONDITION", "startup", "server_error"),
}


def mapping(error: HeadraceError) -> Mapping:
    """The row of the most specific class of `error` that the table has."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
