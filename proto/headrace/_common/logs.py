"""Logging of every process: lines on stderr, plain or JSON. Text of users is logged at no level above debug."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Origin:
    """The request that log lines are about."""

    request_id: str
    trace_id: str | None = None  # of W3C's traceparent
    traceparent: str | None = None  # as it was given
    made: bool = False  # the id was made here: its client gave none

    @classmethod
    def of(cls, request_id: str, traceparent: str | None, made: bool = False) -> Origin:
        """With the trace that a header names, if it is one (https://www.w3.org/TR/trace-context/)."""
        match = _TRACEPARENT.fullmatch(traceparent or "")
        return cls(request_id, match[1] if match else None, traceparent if match else None, made)


ORIGIN: ContextVar[Origin | None] = ContextVar("origin", default=None)


@contextlib.contextmanager
def about(origin: Origin | None) -> Iterator[None]:
    """Have log lines within be about a request."""
    token = ORIGIN.set(origin)
    try:
        yield
    finally:
        ORIGIN.reset(token)


class PlainFormatter(logging.Formatter):
    """LEVEL message; lines about a request name it before the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        origin = ORIGIN.get()
        if origin is None:
            return f"{record.levelname} {record.message}"
        trace = f" trace {origin.trace_id}" if origin.trace_id else ""
        return f"{record.levelname} [{origin.request_id}{trace}] {record.message}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp (UTC, ISO 8601), level, process, message, `request_id` and `trace_id` of lines
    about a request, and `error` with a traceback.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "timestamp": f"{seconds}.{int(record.msecs):03d}Z", "level": record.levelname, "process": self.process,
            "message": record.getMessage(),
        }
        if (origin := ORIGIN.get()) is not None:
            line["request_id"] = origin.request_id
            if origin.trace_id:
                line["trace_id"] = origin.trace_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup(process: str, level: str = "info", as_json: bool = False) -> None:
    """Send all logging of this process to stderr. `process` is named in JSON lines; the launcher prefixes plain ones."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "urllib3", "filelock", "aiohttp.access", "grpc", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
