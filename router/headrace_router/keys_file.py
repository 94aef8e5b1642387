"""The file of `--api-keys-file`: TOML, one table a tenant.

    [tenants.acme]
    keys = ["sk-acme-1", "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"]
    classes = ["chat", "agent"]      # that its requests may name, the first by default; all if not given
    requests_per_minute = 60         # no limit if not given, as with the next two
    tokens_per_minute = 100000
    max_concurrent_requests = 8
    weight = 2.0                     # share of the service under contention, 1 if not given
    cache_salt = "acme"              # the tenant's name if not given: nobody else's prefixes are shared
"""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace._common.errors import StartupError
from headrace_router.tenants import CLASSES, Quota, Tenant, digest

log = logging.getLogger(__name__)

HASH = re.compile(r"sha256:([0-9a-f]{64})")
KEY = re.compile(r"[!-~]+")  # what fits into a header
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it is a metric's label

Positive = Annotated[int, msgspec.Meta(ge=1)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """One tenant's table."""

    keys: Annotated[list[str], msgspec.Meta(min_length=1)]
    classes: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None
    weight: Weight = 1.0
    cache_salt: str | None = None


class KeysFile:
    """The file, and whether it has changed since it was read."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: tuple[int, ...] | None = None

    def read(self) -> dict[bytes, Tenant]:
        """The tenants by hashed key.

        Raises:
            StartupError: the file is not usable; names it, and the line or field.
        """
        self._seen = self._signature()
        try:
            data = self._path.read_bytes()
            mode = self._path.stat().st_mode
        except OSError as error:
            raise StartupError(f"--api-keys-file {self._path}: {error.strerror or error}") from None
        if mode & 0o007:
            log.warning("--api-keys-file %s can be read by everybody on this machine: chmod 600 it", self._path)
        return parse(data, str(self._path))

    def changed(self) -> bool:
        """Is it another file than the one that was read last, or has it been written to?"""
        return self._signature() != self._seen

    def _signature(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def parse(data: bytes, path: str) -> dict[bytes, Tenant]:
    """The tenants of a file by hashed key.

    Raises:
        StartupError: it is not TOML (names the line), or not of this shape (names tenant, field and line). Keys are
            never part of the message.
    """
    place = f"--api-keys-file {path}"
    try:
        text = data.decode("utf-8")
        tables = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise StartupError(f"{place}: not UTF-8, at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"{place}: {error}") from None
    rows = tables.pop("tenants", {})
    if tables:
        raise StartupError(f"{place}: line {_line(text, None, next(iter(tables)))}: only [tenants.NAME] tables are known")
    if not isinstance(rows, dict) or not rows:
        raise StartupError(f"{place}: there is no [tenants.NAME] table")
    by_key: dict[bytes, Tenant] = {}
    for name, row in rows.items():
        try:
            tenant, keys = _tenant(name, row)
            for key in keys:
                if by_key.setdefault(key, tenant) is not tenant:
                    raise _Wrong("keys", f"one of them belongs to the tenant {by_key[key].name} too")
        except _Wrong as error:
            line = _line(text, name, error.field)
            where = f"[tenants.{name}]" + (f" {error.field}" if error.field else "")
            raise StartupError(f"{place}: line {line}: {where}: {error}") from None
    return by_key


class _Wrong(ValueError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _tenant(name: str, table: Any) -> tuple[Tenant, list[bytes]]:
    if not NAME.fullmatch(name):
        raise _Wrong("", "a tenant's name has up to 64 letters, digits and . _ -")
    try:
        row = msgspec.convert(table, Row)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        named = re.search(r"field `(\w+)`", message)
        raise _Wrong(re.split(r"[\[`.]", where)[0] or (named[1] if named else ""), message) from None
    for workload in row.classes or ():
        if workload not in CLASSES:
            raise _Wrong("classes", f"there are {', '.join(CLASSES)}")
    quota = Quota(row.requests_per_minute, row.tokens_per_minute, row.max_concurrent_requests)
    salt = name if row.cache_salt is None else row.cache_salt
    classes = tuple(row.classes or CLASSES)
    tenant = Tenant(name, classes=classes, weight=row.weight, quota=quota, cache_salt=salt)
    return tenant, [_hashed(key) for key in row.keys]


def _hashed(key: str) -> bytes:
    if key.startswith("sha256:"):
        if not (match := HASH.fullmatch(key)):
            raise _Wrong("keys", "after `sha256:` there must be 64 hexadecimal digits in lower case")
        return bytes.fromhex(match[1])
    if not KEY.fullmatch(key):
        raise _Wrong("keys", "a key is not empty, and of printable ASCII characters without spaces")
    return digest(key)


def _line(text: str, tenant: str | None, field: str) -> int:
    """Where a tenant's field is, as near as the text tells: its own line, else that of the table."""
    within, at = tenant is None, 1
    header = re.compile(rf"\s*\[\s*tenants\s*\.\s*[\"']?{re.escape(tenant or '')}[\"']?\s*\]")
    wanted = re.compile(rf"\s*\[*\s*[\"']?{re.escape(field)}[\"']?\s*[=\].]")
    for number, line in enumerate(text.splitlines(), 1):
        if tenant is not None and re.match(r"\s*\[", line):
            within = header.match(line) is not None
            at = number if within else at
        elif within and field and wanted.match(line):
            return number
    return at
