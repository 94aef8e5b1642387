"""Build hook: generates the gRPC code of proto/headrace/v1/generation.proto beside it, and compiles the CPU kernels."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        built = generate(root)
        if kernels := compile_kernels(root):
            built.append(kernels)
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        build_data["artifacts"] += [f"/{p.relative_to(root)}" for p in built]


def generate(root: Path) -> list[Path]:
    """Write *_pb2.py, *_pb2.pyi, *_pb2_grpc.py and *_pb2_grpc.pyi; returns their paths.

    Raises:
        RuntimeError: protoc failed; its own message is on stderr.
    """
    import grpc_tools
    from grpc_tools import protoc

    folder = root / "proto/headrace/v1"
    out = str(root / "proto")
    # protoc finds its plugins by PATH, which lacks the environment's own programs when that is not activated.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    status = protoc.main([
        "protoc", f"-I{root / 'proto'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", f"--mypy_grpc_out={out}",
        str(folder / "generation.proto"),
    ])
    if status:
        raise RuntimeError(f"protoc ended with status {status}")
    return [folder / f"generation_{end}" for end in ("pb2.py", "pb2.pyi", "pb2_grpc.py", "pb2_grpc.pyi")]


def compile_kernels(root: Path) -> Path | None:
    """The kernels' library; None, with a line on stderr, where it cannot be compiled: torch does its work then."""
    spec = importlib.util.spec_from_file_location("headrace_kernels_build", root / "shard/headrace_shard/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        built: Path = module.build()
    except module.BuildFailed as error:
        print(f"note: the CPU kernels are left out: {error}", file=sys.stderr)
        return None
    return built


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
    compile_kernels(Path(__file__).resolve().parent)
