"""The names under which clients find requests again: a request's own id, and the X-Request-Id of its call."""

from __future__ import annotations

from contextvars import ContextVar

from headrace._common.logs import ORIGIN, Origin

MOST = 65_536  # names, of which the oldest are forgotten

_LAST: ContextVar[tuple[Origin, int] | None] = ContextVar("last_choice", default=None)


def call_name() -> str | None:
    """What the next request of the present call is named: the call's X-Request-Id; ID.1, ID.2 ... for further choices."""
    origin = ORIGIN.get()
    if origin is None:
        return None
    last = _LAST.get()
    number = last[1] + 1 if last is not None and last[0] is origin else 0
    _LAST.set((origin, number))
    return f"{origin.request_id}.{number}" if number else origin.request_id


class Names:
    """By tenant and name: the job that had it last."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], str] = {}

    def add(self, tenant: str, name: str, job: str) -> None:
        """A job has this name from now on."""
        self._jobs.pop((tenant, name), None)
        self._jobs[tenant, name] = job
        if len(self._jobs) > MOST:
            del self._jobs[next(iter(self._jobs))]

    def find(self, tenant: str, name: str) -> str | None:
        """None: no request of the tenant's had this name, or it was long ago."""
        return self._jobs.get((tenant, name))
