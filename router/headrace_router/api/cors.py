"""Cross-origin requests of pages in browsers (https://fetch.spec.whatwg.org/#http-cors-protocol).

Cookies and the like are never allowed: who may call is decided by API keys alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from headrace._common.errors import StartupError

METHODS = "GET, POST"
MAX_AGE = "600"  # seconds that a browser may remember a preflight's answer
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")


class Cors:
    """Which origins may read answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: none, or `*` among them, allows all.

        Raises:
            StartupError: one is not an origin.
        """
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise StartupError(
                    f"--cors-allow-origin {origin}: an origin is a scheme and a host, as https://example.org, or *"
                )
        self._origins = None if not origins or "*" in origins else frozenset(origins)

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """What the answer to a request with these headers says to a browser."""
        origin = asked.get("Origin")
        if origin is None:
            return {} if self._origins is None else {"Vary": "Origin"}
        if self._origins is None:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": "*"}
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "*", "Vary": "Origin"}

    def preflight(self, asked: Mapping[str, str]) -> dict[str, str] | None:
        """The headers of the answer to a preflight beside `headers`; None if it is none."""
        if "Origin" not in asked or "Access-Control-Request-Method" not in asked:
            return None
        answer = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": MAX_AGE}
        names = asked.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(names):
            answer["Access-Control-Allow-Headers"] = names  # client libraries have headers of their own
        return answer
