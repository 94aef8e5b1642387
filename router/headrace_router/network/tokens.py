"""Tokens of workers: who may join, and on which terms. Only their SHA-256 is kept; a token is shown once, when it is made.

A token is `wk_ID_SECRET`. The gateway's first one goes to the file that --worker-token-file names; the hashes of all are in
the file beside it, `FILE.workers.json`, which is read again when it changes: a revoked worker is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path, PurePath

import msgspec
from msgspec import Struct

from headrace._common.errors import NotFound, StartupError
from headrace_router.network.jobs import TIERS

TOKEN = re.compile(r"wk_([0-9a-f]{8})_[0-9a-f]{64}")
SUFFIX = ".workers.json"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class WorkerToken(Struct, omit_defaults=True):
    """What is known of a token, and what its holder may do. Times are Unix times."""

    id: str
    name: str
    sha256: str
    created: int
    revoked: int | None = None
    tier: str = "trusted"
    expires: int | None = None
    slots: int | None = None  # most that its holder gets
    models: tuple[str, ...] = ()  # that its holder may serve; all if there are none

    @property
    def lapse(self) -> str | None:
        """Why it does not count any more; None: it does."""
        if self.revoked is not None:
            return "the token was revoked"
        if self.expires is not None and time.time() >= self.expires:
            return "the token has expired"
        return None

    def covers(self, model: str) -> bool:
        """May its holder serve a model of this name?"""
        return not self.models or PurePath(model).name in {PurePath(name).name for name in self.models}


class WorkerTokens:
    """The file of hashes: a JSON list of `WorkerToken`s."""

    def __init__(self, token_file: str) -> None:
        """
        Raises:
            StartupError: the file is there and cannot be read.
        """
        self._token_file = Path(token_file)
        self.path = self._token_file.with_name(self._token_file.name + SUFFIX)
        self._stamp: tuple[int, int] | None = None
        self.rows: list[WorkerToken] = []
        self.reload()

    def reload(self) -> bool:
        """Take the file's content if it has changed; True if it had.

        Raises:
            StartupError: it cannot be read, or is not such a file.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return False
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp == self._stamp:
            return False
        try:
            rows = msgspec.json.decode(self.path.read_bytes(), type=list[WorkerToken])
            if odd := {row.tier for row in rows} - TIERS.keys():
                raise ValueError(f"tier {min(odd)!r} is none of {', '.join(TIERS)}")
        except (OSError, ValueError) as error:
            raise StartupError(f"{self.path} cannot be read as worker tokens: {error}") from None
        self.rows, self._stamp = rows, stamp
        return True

    def ensure_first(self) -> None:
        """Have a token in the token file, of tier owner: the one that is there, or a new one, with mode 0600.

        Raises:
            StartupError: the file cannot be written, or holds something else.
        """
        try:
            if self._token_file.exists():
                token = read_token(str(self._token_file))
                if not TOKEN.fullmatch(token):
                    raise StartupError(f"--worker-token-file {self._token_file} holds no worker token (wk_ID_SECRET)")
                if all(row.sha256 != _digest(token) for row in self.rows):
                    with self._changed() as rows:
                        rows.append(_row(token, "first", "owner"))
                return
            write_token(self._token_file, self.create("first", "owner"))
        except OSError as error:
            raise StartupError(f"--worker-token-file {self._token_file}: {error.strerror}") from None

    def find(self, token: str) -> WorkerToken | None:
        """The row of a token that counts. Every hash is compared, in constant time."""
        given = _digest(token)
        found = [row for row in self.rows if hmac.compare_digest(row.sha256, given) and row.lapse is None]
        return found[0] if found else None

    def lapse(self, worker: str) -> str | None:
        """Why the holder of the token with this id may not work any more; None: it may."""
        return next((row.lapse for row in self.rows if row.id == worker), "the token is not known")

    def create(
        self, name: str, tier: str = "trusted", expires: int | None = None, slots: int | None = None,
        models: tuple[str, ...] = (),
    ) -> str:
        """A new token, which is nowhere kept."""
        token = f"wk_{secrets.token_hex(4)}_{secrets.token_hex(32)}"
        with self._changed() as rows:
            rows.append(_row(token, name, tier, expires, slots, models))
        return token

    def revoke(self, worker: str) -> None:
        """
        Raises:
            NotFound: there is no such token.
        """
        with self._changed() as rows:
            found = [row for row in rows if row.id == worker]
            if not found:
                raise NotFound(f"there is no worker token {worker}")
            for row in found:
                row.revoked = row.revoked or int(time.time())

    @contextlib.contextmanager
    def _changed(self) -> Iterator[list[WorkerToken]]:
        """Change the rows in the file, one process at a time."""
        with open(os.open(f"{self.path}.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.reload()
            yield self.rows
            scratch = self.path.with_name(self.path.name + ".new")
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self.rows), indent=1))
            scratch.replace(self.path)
            stat = self.path.stat()
            self._stamp = (stat.st_mtime_ns, stat.st_size)


def _row(
    token: str, name: str, tier: str, expires: int | None = None, slots: int | None = None, models: tuple[str, ...] = ()
) -> WorkerToken:
    match = TOKEN.fullmatch(token)
    assert match is not None
    return WorkerToken(
        match[1], name, _digest(token), int(time.time()), tier=tier, expires=expires, slots=slots, models=models
    )


def write_token(path: Path, token: str) -> None:
    """A new file with a token, for this user alone.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(token + "\n")


def read_token(path: str) -> str:
    """The token in a file.

    Raises:
        StartupError: the file cannot be read, or holds no worker token; never shows what it holds.
    """
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"--worker-token-file {path}: {why}") from None
    if not text.isascii() or not text.isprintable() or " " in text or not text.startswith("wk_"):
        raise StartupError(f"--worker-token-file {path} holds no worker token (wk_...)")
    return text
