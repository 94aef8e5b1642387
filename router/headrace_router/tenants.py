"""Who asks: the table from API key to tenant. Auth, rate limits, fair share and caches all ask it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace._common.errors import StartupError, Unauthorized

log = logging.getLogger(__name__)

CLASSES = ("chat", "agent", "document")  # workload classes, most urgent first
WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may ask for; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Someone who sends requests."""

    name: str
    classes: tuple[str, ...] = CLASSES  # that its requests may name; the first is used where one names none
    weight: float = 1.0  # share of the service under contention
    quota: Quota = Quota()
    cache_salt: str = ""  # prefixes are shared only under the same salt
    variant: str = ""  # model variant of an A/B test

    @property
    def workload(self) -> str:
        """The class of a request that names none."""
        return self.classes[0]


ANONYMOUS = Tenant("anonymous")
DEFAULT = Tenant("default")  # who holds --api-key


def digest(key: str) -> bytes:
    """The form in which API keys are kept and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeySource(Protocol):
    """Where keys come from beside --api-key; see `keys_file.KeysFile`."""

    def read(self) -> Mapping[bytes, Tenant]:
        """The tenants by hashed key.

        Raises:
            StartupError: the content is not usable.
        """
        ...

    def changed(self) -> bool:
        """Is there something that was not read?"""
        ...


class Tenants:
    """API keys, stored hashed, and whom they belong to. Without keys everybody is the anonymous tenant."""

    def __init__(self, api_key: str | None = None, file: KeySource | None = None, workload: str = CLASSES[0]) -> None:
        """`workload`: class of requests that name none, for tenants that may use all.

        Raises:
            StartupError: the file is not usable.
        """
        self._classes = (workload, *(name for name in CLASSES if name != workload))
        self._anonymous = self._adapted(ANONYMOUS)
        self._own = {digest(api_key): self._adapted(DEFAULT)} if api_key else {}
        self._file = file
        self._by_key = {**self._own, **(self._read(file) if file is not None else {})}

    @property
    def open(self) -> bool:
        """Is no key needed?"""
        return not self._by_key

    def find(self, keys: Iterable[str]) -> Tenant:
        """The tenant that one of the keys belongs to. Every known key is compared, in constant time.

        Raises:
            Unauthorized: keys are required and none of these is known.
        """
        if self.open:
            return self._anonymous
        given = [digest(key) for key in keys]
        found = [tenant for known, tenant in self._by_key.items() for key in given if hmac.compare_digest(known, key)]
        if not found:
            raise Unauthorized("a valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        return found[0]

    def _read(self, file: KeySource) -> dict[bytes, Tenant]:
        return {key: self._adapted(tenant) for key, tenant in file.read().items()}

    def _adapted(self, tenant: Tenant) -> Tenant:
        adapts = tenant.classes is CLASSES and self._classes != CLASSES
        return dataclasses.replace(tenant, classes=self._classes) if adapts else tenant

    def reload(self) -> None:
        """Take the file's content if it has changed; content that is not usable leaves the table as it is, and is
        logged once.
        """
        if self._file is None or not self._file.changed():
            return
        try:
            table = self._read(self._file)
        except StartupError as error:
            log.error("the API keys are not reloaded: %s", error)
            return
        self._by_key = {**self._own, **table}
        log.info("API keys reloaded: %d keys of %d tenants", len(table), len(set(table.values())))

    async def watch(self) -> None:
        """Reload whenever the file changes; never returns."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.reload()
