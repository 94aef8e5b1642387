"""Environments by hash, and programs that are bounded in time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from bench.peers import environments
from bench.peers.environments import REQUIREMENTS, Unavailable, ensure, key, last_words, own_environment, run_bounded
from bench.peers.servers import Server, Start, processes

CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.stem)
def test_every_package_of_a_peer_is_pinned(file: Path) -> None:
    lines = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.!+]+", line)] == []
    assert len({line.split("==")[0].lower() for line in lines}) == len(lines)


def test_an_environment_is_named_by_what_is_in_it() -> None:
    assert key("x", "a==1") == key("x", "a==1")
    assert len({key("x", "a==1"), key("x", "a==2"), key("x", "a==1", "another CPU"), key("y", "a==1")}) == 4


def test_an_environment_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def record(command: tuple[str, ...], seconds: float) -> None:
        commands.append(list(command))
        if command[2] == "venv":
            Path(command[3]).mkdir()

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_ARGS", "--some-option 'a b'")
    monkeypatch.setattr(environments, "run_bounded", record)
    first = ensure("openvino", lambda folder: (folder / "finished").touch())
    assert (first.folder / "finished").exists()
    assert first.folder.parent == tmp_path / "peers"
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][-2:] == ["--some-option", "a b"]
    assert ensure("openvino") == first
    assert len(commands) == 2


def test_torch_comes_first_with_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[tuple[str, ...]] = []

    def record(command: tuple[str, ...], seconds: float) -> None:
        commands.append(command)
        if command[2] == "venv":
            Path(command[3]).mkdir()

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH", "/builds/torch.whl")
    monkeypatch.setattr(environments, "run_bounded", record)
    rest = ensure("transformers").folder / "requirements.txt"
    assert [command[5:] for command in commands[1:]] == [
        ("install", "/builds/torch.whl"), ("install", "--no-deps", "-r", str(rest)),
    ]
    assert "torch==" not in rest.read_text()
    assert "transformers==" in rest.read_text()


def test_llama_cpp_is_compiled_from_a_corrected_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[tuple[str, ...]] = []
    sources: list[str] = []

    def record(command: tuple[str, ...], seconds: float) -> None:
        commands.append(command)
        if command[2] == "venv":
            (Path(command[3]) / "bin").mkdir(parents=True)
        elif command[2] == "pip" and "download" in command:
            tree = Path(command[command.index("-d") + 1])
            (tree / "llama.tar.gz").touch()
            amx = tree / "vendor/llama.cpp" / environments._AMX_FILE
            amx.parent.mkdir(parents=True)
            amx.write_text("    _tile_loadconfig(&tc);\n")
        elif "--build" in command:
            build = Path(command[2])
            sources.append((build.parent / "vendor/llama.cpp" / environments._AMX_FILE).read_text())
            (build / "bin").mkdir(parents=True)
            for program in command[command.index("--target") + 1 :]:
                (build / "bin" / program).touch()

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(environments, "run_bounded", record)
    first = environments.ensure_llama_server("llama-cpp-python==1", avx2=False)
    assert sources == ['    __asm__ volatile("ldtilecfg %0" :: "m"(tc));\n']
    assert {path.name for path in (first.folder / "bin").iterdir()} == {"llama-server", "llama-quantize"}
    assert len([command for command in commands if "-DGGML_NATIVE=ON" in command]) == 1
    assert environments.ensure_llama_server("llama-cpp-python==1", avx2=True) != first
    assert [command for command in commands if "-DGGML_NATIVE=OFF" in command and "-DGGML_AVX2=ON" in command]
    monkeypatch.setattr(environments, "_AMX_FIX", ("a", "b"))
    assert environments.ensure_llama_server("llama-cpp-python==1", avx2=False) != first


def test_an_interrupted_environment_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: tuple[str, ...], seconds: float) -> None:
        if command[2] == "venv":
            assert not Path(command[3]).exists()
            Path(command[3]).mkdir()
        else:
            raise Unavailable("no network")

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "run_bounded", fail)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no network"):
            ensure("ctranslate2")


def test_the_line_that_says_why() -> None:
    assert last_words("a\nERROR: no such package\nhint: look\n\n") == "ERROR: no such package"
    assert last_words("one\ntwo\n") == "two"
    assert last_words("") == "no output"


def test_a_peer_sees_nothing_of_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("LANG", "C")
    found = own_environment({"MORE": "1"})
    assert "PYTHONPATH" not in found
    assert (found["LANG"], found["MORE"]) == ("C", "1")


def test_programs_that_fail() -> None:
    run_bounded((sys.executable, "-c", "pass"), 20)
    with pytest.raises(Unavailable, match="an error of its own"):
        run_bounded((sys.executable, "-c", "raise SystemExit('an error of its own')"), 20)
    with pytest.raises(Unavailable, match="No such file"):
        run_bounded(("/nowhere/program",), 20)


def test_a_program_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = CHILD + f"open({str(pids)!r}, 'w').write(str(__import__('os').getpid())); time.sleep(60)"
    with pytest.raises(Unavailable, match="took more than"):
        run_bounded((sys.executable, "-c", code), 1.0)
    me = psutil.Process()
    assert [child for child in me.children(recursive=True) if "time.sleep(60)" in " ".join(child.cmdline())] == []
    assert not processes(int(pids.read_text()))


def test_a_server_and_its_children_are_stopped() -> None:
    code = CHILD + "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
    server = Server(Start((sys.executable, "-c", code), health="/"))
    try:
        assert server.wait_ready() > 0
        members = processes(server.pid)
        assert len(members) == 2
    finally:
        server.stop()
    assert [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE] == []


def test_a_server_that_ends_says_why() -> None:
    server = Server(Start((sys.executable, "-c", "raise SystemExit('error: no model')")))
    with pytest.raises(Unavailable, match="error: no model"):
        server.wait_ready()
    server.stop()
