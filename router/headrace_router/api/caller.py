"""Who calls, and in which workload class: asked once per POST request, before its body is read."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from headrace._common.errors import InvalidRequest
from headrace_router.tenants import CLASSES, Tenant, Tenants

HEADER = "X-Headrace-Class"


@dataclass(frozen=True)
class Caller:
    tenant: Tenant
    workload: str


CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)


def identify(request: web.Request, tenants: Tenants) -> Caller:
    """
    Raises:
        Unauthorized: an API key is needed, and this request has none that is known.
        InvalidRequest: it names a workload class that does not exist.
    """
    tenant = tenants.find(request.headers.get("Authorization"))
    workload = request.headers.get(HEADER, tenant.workload)
    if workload not in CLASSES:
        raise InvalidRequest(f"the header {HEADER} must be one of {', '.join(CLASSES)}", HEADER)
    return Caller(tenant, workload)
