"""The one interface of everything that stands behind the APIs."""

from __future__ import annotations

from typing import Protocol

from headrace_router.streams import TokenStream
from headrace_router.types import GenerateRequest


class Engine(Protocol):
    """Runs requests. Batchers, sets of replicas, caches, upstream servers and worker networks are engines."""

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Accept a request. Its stream carries tokens and exactly one terminal event: an end, or an error.

        Closing the stream before that cancels the request.
        """
        ...
