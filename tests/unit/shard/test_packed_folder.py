"""A packed copy of a model holds what `--quantize` makes at a start, to the last bit, and is served as a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace._common import options
from headrace._common.errors import StartupError
from headrace._common.model_folder import GGUF_NAME, ModelFolder
from headrace_launcher import cli
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import Library
from headrace_shard.weights import open_weights, packed_folder
from headrace_shard.weights.precision import BY_QUANTIZE, OWN
from headrace_shard.weights.safetensors import SafetensorsWeights
from tests.models import TINY, shapes, write_tiny_model
from tests.tiny_gguf import write_tiny_gguf
from tests.unit.shard.test_own_weights import loaded_from, write_halves

pytestmark = pytest.mark.skipif(
    building.compiler() is None and not building.library_path().exists(), reason="no compiler: nothing can be packed"
)


@pytest.mark.parametrize("quantize", ["int8", "q4"])
@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen2", "intermediate_size": 130}])
def test_the_copy_holds_what_a_start_would_make(quantize: str, changes: dict[str, object], tmp_path: Path) -> None:
    """Feed-forward columns in no whole groups stay as they are."""
    folder, copy = write_halves(tmp_path / "a", torch.bfloat16, **changes), tmp_path / "b"
    copy.mkdir()
    packed_folder.write(ModelFolder.open(folder), copy, quantize)
    before, after, library = SafetensorsWeights(folder), open_weights(ModelFolder.open(copy)), Library()
    assert after.names() == before.names()
    for name, shape in shapes({**TINY, **changes}).items():
        if len(shape) == 1:
            assert torch.equal(after.get(name, shape), before.get(name, shape).float())
            continue
        size, head = (shape[0], shape[1]), name in ("lm_head.weight", "model.embed_tokens.weight")
        made = library.pack(before.matrix(name, size, precision=BY_QUANTIZE[quantize], head=head))
        assert torch.equal(library.pack(after.matrix(name, size, precision=OWN)), made), name
    assert [path.name for path in copy.iterdir() if "safetensors" in path.name] == []


def test_the_command_makes_a_folder_that_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, copy = write_tiny_model(tmp_path / "a"), tmp_path / "new" / "b"
    command = ["quantize", str(folder), str(copy), "--quantize", "q4"]
    assert options.run(cli.headrace, command) == 0
    assert options.run(cli.headrace, ["resolve", "--model-id", str(copy)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(copy)]
    assert set(loaded_from(copy).roofline.formats) == {"Q4_1", "Q8_0"}
    assert options.run(cli.headrace, command) == 1
    assert "exists already" in capsys.readouterr().err
    with open(copy / GGUF_NAME, "r+b") as file:
        file.truncate(20_000)
    assert options.run(cli.headrace, ["resolve", "--model-id", str(copy)]) == 1
    assert f"{GGUF_NAME} is cut short" in capsys.readouterr().err


def test_a_gguf_is_not_packed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_gguf(tmp_path / "a", "F16")
    with pytest.raises(StartupError, match="is packed already"):
        packed_folder.write(ModelFolder.open(folder), tmp_path, "int8")
    assert options.run(cli.headrace, ["quantize", str(folder), str(tmp_path / "b")]) == 1
    assert "is packed already" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
