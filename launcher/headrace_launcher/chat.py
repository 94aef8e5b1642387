"""A small chat on the terminal, over /v1/chat/completions."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field

_TIMEOUT = 600.0  # seconds without a byte


class ChatError(Exception):
    """The server refused, failed, or is not there; the message says so."""


@dataclass
class Client:
    """One conversation with one server."""

    url: str
    api_key: str | None = None
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they arrive. Question and answer join the conversation when it is whole.

        Raises:
            ChatError: there is no answer, or it broke off.
        """
        question = {"role": "user", "content": text}
        body: dict[str, object] = {"model": "default", "messages": [*self.messages, question], "stream": True}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        pieces = []
        for piece in self._stream(body):
            pieces.append(piece)
            yield piece
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, body: dict[str, object]) -> Iterator[str]:
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            path = urllib.parse.urlsplit(self.url).path.rstrip("/") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_reason(response.status, response.read()))
            for line in response:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    yield _piece(line[5:])
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"no answer from {self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        try:
            parts = urllib.parse.urlsplit(self.url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme not in ("http", "https") or not host:
            raise ChatError(f"{self.url} is not the URL of a server")
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=_TIMEOUT)


def _piece(data: bytes) -> str:
    frame = json.loads(data)
    if "error" in frame:
        raise ChatError(_reason(200, data))
    choices = frame.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def _reason(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"


def run(client: Client, system: str | None, prompt: str | None) -> int:
    """Talk until the input ends; returns the exit status."""
    if system:
        client.messages.append({"role": "system", "content": system})
    if prompt is not None:
        return _answer(client, prompt)
    tty = sys.stdin.isatty()
    if tty:
        print(f"Chat with {client.url}. Ctrl-C stops an answer, Ctrl-D ends.")
    status = 0
    while (line := _read("> " if tty else "")) is not None:
        if line.strip():
            status = _answer(client, line)
            if status and not tty:
                return status
    return 0 if tty else status


def _read(mark: str) -> str | None:
    while True:
        try:
            return input(mark)
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


def _answer(client: Client, text: str) -> int:
    try:
        for piece in client.ask(text):
            print(piece, end="", flush=True)
        print()
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0
