"""Compiles the CPU kernels. Imports nothing of the project: the build hook loads this file by its path.

The library's name carries a hash of its sources and flags, so that one of other sources is never taken for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "src"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wall")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
AMX = (*AVX512, "-mprfchw", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16")
VARIANTS = {"avx2": AVX2, "avx512": AVX512, "amx": AMX}  # beside the portable one


class BuildFailed(Exception):
    """No compiler, or it refused; one line."""


def library_path() -> Path:
    """Where the library for these sources lies once it is built."""
    digest = hashlib.sha256(repr((FLAGS, VARIANTS, platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return FOLDER / f"libheadrace-{digest.hexdigest()[:12]}.so"


def compiler() -> str | None:
    """The C++ compiler: $CXX, c++ or g++."""
    return next((found for name in (os.environ.get("CXX"), "c++", "g++") if name and (found := shutil.which(name))), None)


def is_x86() -> bool:
    """Whether this machine is of the kind that `VARIANTS` are for."""
    return platform.machine() in ("x86_64", "AMD64")


def accepts(program: str, flags: tuple[str, ...]) -> bool:
    """Whether the compiler knows the flags: an older one does not know the newest instruction sets."""
    command = [program, *flags, "-x", "c++", "-E", os.devnull]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def build() -> Path:
    """The library, compiled if these sources have not been; processes that start together compile once.

    Raises:
        BuildFailed: there is no compiler, it failed, or the folder cannot be written.
    """
    path = library_path()
    if path.exists():
        return path
    program = compiler()
    if program is None:
        raise BuildFailed("no C++ compiler found (Debian: apt install g++)")
    try:
        with open(FOLDER / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(program, path)
    except OSError as error:
        raise BuildFailed(f"cannot write {FOLDER}: {error.strerror}") from None
    return path


def _compile(program: str, path: Path) -> None:
    """Compile all sources side by side, link, and put the result in place at once; older libraries go."""
    work = FOLDER / f".build-{os.getpid()}"
    work.mkdir()
    try:
        variants = {name: flags for name, flags in VARIANTS.items() if is_x86() and accepts(program, flags)}
        # Templates of the standard library exist in several objects and the linker keeps the first: that must be one
        # that runs everywhere.
        units = {
            work / "portable.o": ["variant.cpp", "-DVARIANT=portable"], work / "pool.o": ["pool.cpp"],
            work / "blocks.o": ["blocks.cpp"], work / "shared.o": ["shared.cpp"],
            work / "library.o": ["library.cpp", *(f"-DHEADRACE_HAS_{name.upper()}" for name in variants)],
        }
        for name, flags in variants.items():
            units[work / f"{name}.o"] = ["variant.cpp", f"-DVARIANT={name}", *flags]
        running = [
            subprocess.Popen(
                [program, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(out)], stderr=subprocess.PIPE, text=True
            )
            for out, (source, *flags) in units.items()
        ]
        _check([process.communicate()[1] for process in running], [process.returncode for process in running])
        linked = work / path.name
        command = [program, "-shared", "-pthread", "-o", str(linked), *map(str, units)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        _check([done.stderr], [done.returncode])
        os.replace(linked, path)
        for old in FOLDER.glob("libheadrace-*.so"):
            if old != path:
                old.unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(messages: list[str], statuses: list[int]) -> None:
    for message, status in zip(messages, statuses, strict=True):
        if status:
            lines = [line for line in message.splitlines() if "error" in line] or message.splitlines() or ["no message"]
            raise BuildFailed(f"the C++ compiler ended with status {status}: {lines[0]}")
