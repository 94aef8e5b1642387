"""The kernels and their thread pool under the compiler's sanitizers: a program of their sources, compiled for each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace_shard.kernels import build

PROGRAM = Path(__file__).with_name("exercise.cpp")
ROUNDS = {"address,undefined": 40, "thread": 12}

pytestmark = pytest.mark.kernels


def compile_with(sanitizers: str, folder: Path) -> Path:
    """The program, linked with the sources of the library for every instruction set."""
    compiler = build.compiler()
    assert compiler, "the sanitizers need a C++ compiler"
    flags = [f for f in build.FLAGS if f != "-O3"] + ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    variants = {name: extra for name, extra in build.VARIANTS.items() if build.is_x86() and build.accepts(compiler, extra)}
    units: list[tuple[Path, list[str]]] = [(PROGRAM, [])]
    for source in sorted(build.SOURCES.glob("*.cpp")):
        if source.name == "variant.cpp":
            units.append((source, ["-DVARIANT=portable"]))
            units += [(source, [f"-DVARIANT={name}", *flags]) for name, flags in variants.items()]
        else:
            units.append((source, [f"-DHEADRACE_HAS_{name.upper()}" for name in variants]))
    objects = [folder / f"{number}.o" for number in range(len(units))]
    running = [
        subprocess.Popen([compiler, *flags, *extra, "-I", str(build.SOURCES), "-c", str(source), "-o", str(out)])
        for out, (source, extra) in zip(objects, units, strict=True)
    ]
    assert [process.wait() for process in running] == [0] * len(units)
    program = folder / "exercise"
    subprocess.run([compiler, f"-fsanitize={sanitizers}", "-pthread", "-o", str(program), *map(str, objects)], check=True)
    return program


@pytest.mark.parametrize("sanitizers", ROUNDS)
def test_the_kernels_are_clean_under(sanitizers: str, tmp_path: Path) -> None:
    program = compile_with(sanitizers, tmp_path)
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}  # the pool lives as long as the process
    done = subprocess.run(
        [str(program), str(ROUNDS[sanitizers])], env={**os.environ, **options}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[:4000]
