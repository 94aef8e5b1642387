"""Request ids: taken from the client where they are usable, made where not, and named in every log line."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from headrace._common.logs import Origin

HEADER = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def origin(headers: Mapping[str, str]) -> Origin:
    """The id of a request, and the trace that it is part of.

    An id of other characters than those of ids could forge log lines and headers: it is replaced.
    """
    given = headers.get(HEADER, "")
    made = _ID.fullmatch(given) is None
    return Origin.of(uuid.uuid4().hex if made else given, headers.get("traceparent"), made)
