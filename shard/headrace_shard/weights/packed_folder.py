"""A packed copy of a safetensors model: its matrices as Q8_0 and Q4_1 blocks in a GGUF, so that no later start rounds them.

The blocks are those that `--quantize` makes at a start. The file is for Headrace: its tensors lie in the order of
`transformers` and it has no metadata, which stays in the JSON files beside it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headrace._common.errors import StartupError
from headrace._common.model_folder import GGUF_NAME, ModelFolder
from headrace_shard.kernels.build import BuildFailed
from headrace_shard.kernels.library import GROUP_BYTES, PANEL, Library
from headrace_shard.weights.dequantize import BF16, F16, F32, Q4_1, Q8_0
from headrace_shard.weights.gguf import gguf_name
from headrace_shard.weights.precision import BY_QUANTIZE, GROUP, Format
from headrace_shard.weights.safetensors import SafetensorsWeights
from headrace_shard.weights.source import Dense

ARCHITECTURE = "headrace"
_WEIGHTS = re.compile(r".*\.(safetensors|safetensors\.index\.json|gguf|bin|bin\.index\.json|pt|pth|h5|onnx)")
_KINDS = {Format.FLOAT32: F32, Format.BFLOAT16: BF16, Format.FLOAT16: F16, Format.INT8: Q8_0, Format.INT4: Q4_1}
_STORED = {torch.bfloat16: BF16, torch.float16: F16}
_LOOKED_UP = ("lm_head.weight", "model.embed_tokens.weight")  # 8 bits, also where only rows of it are looked up
Bytes = npt.NDArray[np.uint8]


def write(folder: ModelFolder, output: Path, quantize: str) -> None:
    """Write the packed model to an empty folder.

    Raises:
        StartupError: the model is a GGUF, its files are damaged, or the kernels, which round, cannot be built.
    """
    import gguf

    if folder.gguf is not None:
        raise StartupError(f"{folder.gguf} is packed already: serve it as it is")
    try:
        library = Library()
    except BuildFailed as error:
        raise StartupError(f"packing needs the CPU kernels: {error}") from None
    weights, precision = SafetensorsWeights(folder.path), BY_QUANTIZE[quantize]
    shapes = {name: weights.shape(name) for name in sorted(weights.names())}
    formats = dict.fromkeys(shapes, Format.FLOAT32)
    for name, shape in shapes.items():
        if len(shape) == 2:
            kind = _STORED.get(weights.get(name, shape, rows=range(1)).dtype, F32)
            formats[name] = precision.format_of(kind, name in _LOOKED_UP, shape[1] % GROUP == 0)
    writer = gguf.GGUFWriter(output / GGUF_NAME, ARCHITECTURE)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType(_KINDS[formats[name]])
        values, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape)) // values * size
        row = shape[-1] // values * size
        writer.add_tensor_info(gguf_name(name), (*shape[:-1], row), np.dtype(np.uint8), count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        matrix = Dense.of(weights.get(name, shape).reshape(-1, shape[-1]), formats[name])
        writer.write_tensor_data(rows_of(library, matrix))
        weights.release()
    writer.close()
    for path in folder.path.iterdir():
        if path.is_file() and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, output / path.name)


def rows_of(library: Library, matrix: Dense) -> Bytes:
    """A matrix as rows of GGUF blocks, [rows, bytes of a row]."""
    if not matrix.format.grouped:
        values = matrix.whole().to(getattr(torch, matrix.format.label)).contiguous()
        return values.view(torch.uint8).numpy()
    one = GROUP_BYTES[matrix.format]
    panels = library.pack(matrix).numpy().reshape(-1, matrix.columns // GROUP, one)
    held, lines = (PANEL * GROUP, 1) if matrix.format == Format.INT8 else (PANEL * GROUP // 2, 2)
    if matrix.format == Format.INT8:
        whole = panels[:, :, :held].reshape(len(panels), -1, GROUP // 2, PANEL, 2).transpose(0, 3, 1, 2, 4)
        body = whole.reshape(len(panels), PANEL, -1, GROUP)
    else:
        runs = panels[:, :, :held].reshape(len(panels), -1, GROUP // 8, PANEL, 4)
        nibbles = np.stack([runs & 15, runs >> 4], axis=4).transpose(0, 3, 1, 2, 4, 5).reshape(len(panels), PANEL, -1, GROUP)
        body = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    # The scale, and the minimum of 4 bits, come before the values of a block.
    heads = panels[:, :, held:].reshape(len(panels), -1, lines, PANEL, 2).transpose(0, 3, 1, 2, 4)
    blocks = np.concatenate([heads.reshape(len(panels), PANEL, -1, 2 * lines), body], axis=-1)
    return np.ascontiguousarray(blocks.reshape(len(panels) * PANEL, -1)[: matrix.rows])
