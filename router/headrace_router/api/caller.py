"""Who calls, in which workload class, and how long they wait: asked once per POST request, before its body is read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web

from headrace._common.errors import Forbidden, InvalidRequest
from headrace_router.network.jobs import TIERS
from headrace_router.tenants import CLASSES, Tenant, Tenants

CLASS_HEADER = "X-Headrace-Class"
TIER_HEADER = "X-Headrace-Min-Tier"
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
LONGEST_TIMEOUT = 86_400_000  # milliseconds


@dataclass(frozen=True)
class Caller:
    tenant: Tenant
    workload: str
    deadline: float | None = None  # of time.perf_counter()
    min_tier: str = "trusted"


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


def identify(headers: Mapping[str, str], tenants: Tenants) -> Caller:
    """
    Raises:
        Unauthorized: an API key is needed, and this request has none that is known.
        Forbidden: its tenant may not use the workload class that it names.
        InvalidRequest: there is no such class or tier of workers, or the timeout is no number of milliseconds.
    """
    tenant = tenants.find(_keys(headers))
    workload = headers.get(CLASS_HEADER, tenant.workload)
    if workload not in CLASSES:
        raise InvalidRequest(f"the header {CLASS_HEADER} must be one of {', '.join(CLASSES)}", CLASS_HEADER)
    if workload not in tenant.classes:
        raise Forbidden(f"this API key may not use the workload class {workload}, only {', '.join(tenant.classes)}")
    min_tier = headers.get(TIER_HEADER, "trusted")
    if min_tier not in TIERS:
        raise InvalidRequest(f"the header {TIER_HEADER} must be one of {', '.join(TIERS)}", TIER_HEADER)
    return Caller(tenant, workload, _deadline(headers.get(TIMEOUT_HEADER)), min_tier)


def _keys(headers: Mapping[str, str]) -> Iterator[str]:
    """The API keys that a request shows. The scheme is in any case, a key exact."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key
    if "x-api-key" in headers:
        yield headers["x-api-key"]


def _deadline(given: str | None) -> float | None:
    if given is None:
        return None
    number = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if not 0 < number <= LONGEST_TIMEOUT:
        text = f"the header {TIMEOUT_HEADER} must be a whole number of milliseconds from 1 to {LONGEST_TIMEOUT}"
        raise InvalidRequest(text, TIMEOUT_HEADER)
    return time.perf_counter() + number / 1000
