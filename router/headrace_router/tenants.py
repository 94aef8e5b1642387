"""Who asks: the table from API key to tenant. Auth, fair share, limits and caches all ask it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from headrace._common.errors import Unauthorized

CLASSES = ("chat", "agent", "document")  # workload classes, most urgent first


@dataclass(frozen=True, slots=True)
class Tenant:
    """Someone who sends requests."""

    name: str
    workload: str = CLASSES[0]  # used where a request does not name its class
    weight: float = 1.0  # share of the service under contention
    limits: dict[str, int] = field(default_factory=dict, hash=False)
    cache_salt: str = ""  # prefixes are shared only under the same salt
    variant: str = ""  # model variant of an A/B test


ANONYMOUS = Tenant("anonymous")


def digest(key: str) -> bytes:
    """The form in which API keys are kept and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Tenants:
    """API keys, stored hashed, and whom they belong to. Without keys everybody is the anonymous tenant."""

    def __init__(self, api_key: str | None) -> None:
        self._by_key = {digest(api_key): ANONYMOUS} if api_key else {}

    @property
    def open(self) -> bool:
        return not self._by_key

    def find(self, authorization: str | None) -> Tenant:
        """The tenant that an Authorization header speaks for. The scheme is in any case, the key exact.

        Raises:
            Unauthorized: keys are required and this is none of them.
        """
        if not self._by_key:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        given = digest(key)
        found = [tenant for known, tenant in self._by_key.items() if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            raise Unauthorized("a valid API key is needed: send it as `Authorization: Bearer KEY`")
        return found[0]
