"""GGUF files that cannot be served: one line that names the file, the tensor and what is wrong with it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.models import load_model
from headrace_shard.parallel.group import Alone
from headrace_shard.weights import open_weights
from tests.tiny_gguf import write_tiny_gguf

TENSOR = "blk.0.ffn_up.weight"


def load(folder: Path) -> None:
    opened = ModelFolder.open(folder)
    load_model(opened, open_weights(opened), TorchBackend(torch.float32, torch.device("cpu"), Alone()))


def set_type(file: Path, kind: int) -> None:
    """Say in the file's header that the tensor is of another type."""
    data = bytearray(file.read_bytes())
    at = data.index(TENSOR.encode()) + len(TENSOR)
    (dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, kind)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "why"), [(99, "GGUF tensor type 99 is not known"), (24, "GGUF tensor type I8 cannot be unpacked")]
)
def test_a_tensor_of_a_type_that_cannot_be_read(kind: int, why: str, tmp_path: Path) -> None:
    folder = write_tiny_gguf(tmp_path, "Q4_1")
    load(folder)
    set_type(folder / "model.gguf", kind)
    with pytest.raises(StartupError, match=rf"^{TENSOR} of .*model\.gguf: {re.escape(why)}$"):
        load(folder)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path, "Q4_1") / "model.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(StartupError, match=r"model\.gguf is cut off: tensor .* ends beyond the file"):
        load(tmp_path)
