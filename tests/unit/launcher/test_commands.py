"""The other commands: version, doctor, resolve, and the chat against a scripted server."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import __version__
from headrace._common import options
from headrace_launcher import chat, cli


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers a chat with the number of messages that it was sent."""

    requests: list[tuple[dict[str, Any], str | None]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((body, self.headers["Authorization"]))
        if body["messages"][-1]["content"] == "refuse":
            self._send(400, json.dumps({"error": {"message": "no such thing"}}).encode())
            return
        pieces = ("é", str(len(body["messages"])))
        frames: list[dict[str, Any]] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if body["messages"][-1]["content"] == "break":
            frames.append({"error": {"message": "the shard is gone"}})
        text = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames)
        self._send(200, f": ping\n\n{text}data: [DONE]\n\n".encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def url() -> Iterator[str]:
    Scripted.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_one_question(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["chat", "--url", url, "--api-key", "k", "--system", "be brief", "--max-tokens", "5", "hello"]
    assert options.run(cli.headrace, argv) == 0
    assert capsys.readouterr().out == "é2\n"
    ((body, key),) = Scripted.requests
    assert key == "Bearer k"
    assert (body["max_tokens"], body["stream"]) == (5, True)
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_a_conversation_from_standard_input(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert options.run(cli.headrace, ["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "é1\né3\n"
    assert Scripted.requests[1][0]["messages"][1] == {"role": "assistant", "content": "é1"}


@pytest.mark.parametrize(("text", "reason"), [("refuse", "no such thing"), ("break", "the shard is gone")])
def test_errors_are_one_line(text: str, reason: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat.Client(url)
    assert chat.run(client, None, text) == 1
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert client.messages == []


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "127.0.0.1:80", "http://[::1", "ftp://x", "http://127.0.0.1:x"])
def test_no_server(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert options.run(cli.headrace, ["chat", "--url", where, "hello"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for command, argv in ((cli.headrace, ["--version"]), (cli.serve_command, ["--version"])):
        assert options.run(command, argv) == 0
        assert __version__ in capsys.readouterr().out


def test_runtime_information(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.run(cli.serve_command, ["--env", "--port", "1"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "python" in out


def test_doctor_says_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.run(cli.headrace, ["doctor", "--port", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    subjects = ["python", "torch", "compiler", "memory", "port", "model cache"]
    assert [line[6:19].strip() for line in lines] == subjects


def test_resolve_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.run(cli.headrace, ["resolve", "--model-id", "/no/such/model"]) == 1
    assert "/no/such/model" in capsys.readouterr().err
