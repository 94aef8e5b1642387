"""The distribution as others install it: editable, from a wheel, and from a wheel built out of the sdist.

One clean environment (grpcio, protobuf, mypy, nothing of the development environment) serves all three; it is kept under
build/ and made again when the versions change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from headrace_shard.kernels import build

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("grpcio", "protobuf", "mypy", "typing_extensions")
PACKAGES = {"headrace", "headrace_launcher", "headrace_router", "headrace_shard"}
ENV = {**{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

USER_SCRIPT = """\
import grpc  # type: ignore[import-untyped]

from headrace.v1 import generation_pb2, generation_pb2_grpc


def ask(text: str) -> generation_pb2.PrefillRequest:
    sampling = generation_pb2.Sampling(temperature=0.5, seed=1)
    stopping = generation_pb2.Stopping(max_new_tokens=5)
    request = generation_pb2.Request(id=1, text=text, sampling=sampling, stopping=stopping)
    return generation_pb2.PrefillRequest(owner="me", requests=[request])


def stub(target: str) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(grpc.insecure_channel(target))


if __name__ == "__main__":
    import sys

    request = ask("Hello")
    number: int = request.requests[0].stopping.max_new_tokens
    assert generation_pb2.PrefillRequest.FromString(request.SerializeToString()) == request
    assert stub("unix:/nowhere") is not None
    assert not {"torch", "headrace._common"} & set(sys.modules)
    print("ok", number)
"""
WRONG_SCRIPT = USER_SCRIPT.replace("id=1", 'id="1"')


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clean_python() -> Path:
    """The interpreter of the clean environment."""
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in NEEDED]
    key = hashlib.sha256(" ".join([sys.version, *pins]).encode()).hexdigest()[:12]
    folder = ROOT / f"build/clean-{key}"
    python = folder / "bin/python"
    if not (folder / "whole").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "-q", *pins)
        (folder / "whole").touch()
    return python


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, its wheel in sdist/ and the tree's wheel in tree/."""
    folder = tmp_path_factory.mktemp("dist")
    wheel = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*wheel, "-w", folder / "tree", ROOT)
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    (sdist,) = folder.glob("*.tar.gz")
    run(*wheel, "-w", folder / "sdist", sdist)
    return folder


@pytest.mark.parametrize("kind", ["editable", "tree", "sdist"])
def test_a_users_script_runs_and_is_typed(kind: str, clean_python: Path, dist: Path, tmp_path: Path) -> None:
    if kind == "editable":
        wheels = tmp_path / "wheels"
        run(sys.executable, "-c", _EDITABLE, wheels)
    else:
        wheels = dist / kind
    (wheel,) = wheels.glob("*.whl")
    run(clean_python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel)
    (tmp_path / "user.py").write_text(USER_SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG_SCRIPT)
    assert run(clean_python, "-P", tmp_path / "user.py", cwd=tmp_path).strip() == "ok 5"
    mypy = (str(clean_python), "-m", "mypy", "--strict", "--cache-dir", str(clean_python.parents[1] / f"mypy-{kind}"))
    run(*mypy, "user.py", cwd=tmp_path)
    wrong = subprocess.run([*mypy, "wrong.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1, "the generated types are not seen: a wrong argument passes"


_EDITABLE = """
import os, sys
from hatchling.build import build_editable
os.makedirs(sys.argv[1])
build_editable(sys.argv[1])
"""


def test_nothing_else_reaches_site_packages(dist: Path) -> None:
    for kind in ("tree", "sdist"):
        (wheel,) = (dist / kind).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        top = {name.split("/")[0] for name in names}
        assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
        for package in PACKAGES:
            assert f"{package}/__init__.py" in names
            assert f"{package}/py.typed" in names
        assert {"headrace/v1/generation_pb2.py", "headrace/v1/generation_pb2.pyi"} <= set(names)
        assert any(name.endswith("/licenses/LICENSE") for name in names)
        kernels = [name for name in names if name.startswith("headrace_shard/kernels/libheadrace-")]
        assert len(kernels) == (1 if build.compiler() else 0)
        assert wheel.name.endswith("-any.whl") != bool(kernels), "a wheel with compiled code is for one platform"


def test_the_sdist_has_no_generated_code(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert not [name for name in names if "_pb2" in name or name.endswith(".so")]
    assert any(name.endswith("/kernels/src/gemm.h") for name in names)
    assert any(name.endswith("/proto/headrace/v1/generation.proto") for name in names)
