"""HTTP bodies into typed structs."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from headrace._common.errors import BodyTooLarge, InvalidRequest, MalformedBody, TooSlow, UnsupportedMediaType
from headrace_router.service import SERVICE

S = TypeVar("S")

LEAST_RATE = 1000  # bytes a second: a body that comes more slowly gets no time beyond --client-timeout


async def read_body(request: web.Request, limit: int) -> bytes:
    """The body of a JSON request.

    Raises:
        UnsupportedMediaType: it is not declared as JSON.
        BodyTooLarge: it is over `limit` bytes; said before the rest of it is read.
        TooSlow: it does not come within --client-timeout and a second for each `LEAST_RATE` bytes that came.
        MalformedBody: its chunks or its compression are not what they should be.
    """
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    too_large = BodyTooLarge(f"the body is larger than the limit of {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body, patience = bytearray(), request.app[SERVICE].settings.client_timeout
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begun + patience) as timer:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise too_large
                timer.reschedule(begun + patience + len(body) / LEAST_RATE)
    except TimeoutError:
        raise TooSlow(f"the body was not whole in time: {len(body)} bytes came") from None
    except (web.HTTPException, RequestPayloadError) as error:
        reason = error.reason if isinstance(error, web.HTTPException) else "it ends early, or its framing is broken"
        raise MalformedBody(f"the body cannot be read: {reason}") from None
    return bytes(body)


def decode(decoder: msgspec.json.Decoder[S], body: bytes) -> S:
    """The struct in a JSON body. Unknown members are ignored.

    Raises:
        MalformedBody: the body is not JSON.
        InvalidRequest: it is, of another shape; names the place.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        place = str(error).partition(" - at `$")[2]
        message = f"Failed to deserialize the JSON body into the target type: {error}"
        raise InvalidRequest(message, place.strip("`.").partition("[")[0].partition(".")[0] or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"Failed to parse the request body as JSON: {error}") from None
    except RecursionError:
        raise MalformedBody("Failed to parse the request body as JSON: it is nested too deeply") from None


async def read_json(request: web.Request, decoder: msgspec.json.Decoder[S], limit: int) -> S:
    """`read_body`, then `decode`."""
    return decode(decoder, await read_body(request, limit))


def refuse_given(**values: Any) -> None:
    """
    Raises:
        InvalidRequest: one of the values is given; this server does not offer what it asks for.
    """
    for field, value in values.items():
        if value or isinstance(value, dict):  # an empty object asks for something, as a schema or as options
            raise InvalidRequest(f"`{field}` is not supported", field, "unsupported_parameter")
