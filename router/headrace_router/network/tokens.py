"""Tokens of workers: who may join. Only their SHA-256 is kept; a token is shown once, when it is made.

A token is `wk_ID_SECRET`. The gateway's first one goes to the file that --worker-token-file names; the hashes of all are in
the file beside it, `FILE.workers.json`, which is read again when it changes: a revoked worker is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace._common.errors import NotFound, StartupError

TOKEN = re.compile(r"wk_([0-9a-f]{8})_[0-9a-f]{64}")
SUFFIX = ".workers.json"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class WorkerTokens:
    """The file of hashes: rows of `{id, name, sha256, created, revoked}`."""

    def __init__(self, token_file: str) -> None:
        """
        Raises:
            StartupError: the file is there and cannot be read.
        """
        self._token_file = Path(token_file)
        self.path = self._token_file.with_name(self._token_file.name + SUFFIX)
        self._stamp: tuple[int, int] | None = None
        self.rows: list[dict[str, Any]] = []
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
            rows = json.loads(self.path.read_text("utf-8"))
            self.rows = [{k: row[k] for k in ("id", "name", "sha256", "created", "revoked")} for row in rows]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{self.path} cannot be read as worker tokens: {error}") from None
        self._stamp = stamp
        return True

    def ensure_first(self) -> None:
        """Have a token in the token file: the one that is there, or a new one, with mode 0600.

        Raises:
            StartupError: the file cannot be written, or holds something else.
        """
        try:
            if self._token_file.exists():
                token = read_token(str(self._token_file))
                if not TOKEN.fullmatch(token):
                    raise StartupError(f"--worker-token-file {self._token_file} holds no worker token (wk_ID_SECRET)")
                if self.find(token) is None and all(row["sha256"] != _digest(token) for row in self.rows):
                    with self._changed() as rows:
                        rows.append(_row(token, "first"))
                return
            token = self.create("first")
            with open(os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(token + "\n")
        except OSError as error:
            raise StartupError(f"--worker-token-file {self._token_file}: {error.strerror}") from None

    def find(self, token: str) -> str | None:
        """The id of a token that may join. Every hash is compared, in constant time."""
        given = _digest(token)
        found = [row["id"] for row in self.rows if hmac.compare_digest(row["sha256"], given) and row["revoked"] is None]
        return found[0] if found else None

    def valid(self, worker: str) -> bool:
        """May the holder of this token's id still work?"""
        return any(row["id"] == worker and row["revoked"] is None for row in self.rows)

    def create(self, name: str) -> str:
        """A new token, which is nowhere kept."""
        token = f"wk_{secrets.token_hex(4)}_{secrets.token_hex(32)}"
        with self._changed() as rows:
            rows.append(_row(token, name))
        return token

    def revoke(self, worker: str) -> None:
        """
        Raises:
            NotFound: there is no such token.
        """
        with self._changed() as rows:
            found = [row for row in rows if row["id"] == worker]
            if not found:
                raise NotFound(f"there is no worker token {worker}")
            for row in found:
                row["revoked"] = row["revoked"] or int(time.time())

    @contextlib.contextmanager
    def _changed(self) -> Iterator[list[dict[str, Any]]]:
        """Change the rows in the file, one process at a time."""
        with open(os.open(f"{self.path}.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.reload()
            yield self.rows
            scratch = self.path.with_name(self.path.name + ".new")
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self.rows, file, indent=1)
            scratch.replace(self.path)
            stat = self.path.stat()
            self._stamp = (stat.st_mtime_ns, stat.st_size)


def _row(token: str, name: str) -> dict[str, Any]:
    match = TOKEN.fullmatch(token)
    assert match is not None
    return {"id": match[1], "name": name, "sha256": _digest(token), "created": int(time.time()), "revoked": None}


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
