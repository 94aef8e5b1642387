"""Matrices in panels: what they hold afterwards, in each format, beside plain numpy; and that products see the same."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import GROUP_BYTES, PANEL, PIECE_ROWS, Library, format_of, panel_bytes
from headrace_shard.parallel.group import Alone
from headrace_shard.weights.dequantize import Q4_K, dequantize
from headrace_shard.weights.precision import BY_QUANTIZE, EXACT, GROUP, OWN, Format
from headrace_shard.weights.source import Blocks, Dense, with_zero_rows
from tests.unit.shard.test_kernels import rounded

Floats = npt.NDArray[np.float32]
TORCH = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}
VARIANTS = ["amx", "avx512", "avx2", "portable"]

pytestmark = pytest.mark.skipif(
    building.compiler() is None and not building.library_path().exists(), reason="no compiler: torch serves here"
)


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = Library(request.param)
    if library.variant != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield library
    Library()


def unpack(library: Library, part: Blocks | Dense) -> Floats:
    """The values that a packed matrix stands for, [rows, columns]."""
    format_, panels = format_of(part), -(-part.rows // PANEL)
    raw = library.pack(part).numpy()
    assert len(raw) == panels * panel_bytes(format_, part.columns)
    if format_ in TORCH:
        held = torch.from_numpy(raw).view(TORCH[format_]).view(panels, part.columns, PANEL)
        return held.float().transpose(1, 2).reshape(panels * PANEL, -1)[: part.rows].numpy()
    groups = raw.reshape(panels, part.columns // GROUP, GROUP_BYTES[format_])
    if format_ == Format.INT8:
        pairs = groups[:, :, : PANEL * GROUP].view(np.int8).reshape(panels, -1, GROUP // 2, PANEL, 2)
        whole = pairs.transpose(0, 3, 1, 2, 4)
        minima = np.zeros((panels, groups.shape[1], PANEL), dtype=np.float32)
    else:
        runs = groups[:, :, : PANEL * GROUP // 2].reshape(panels, -1, GROUP // 8, PANEL, 4)
        whole = np.stack([runs & 15, runs >> 4], axis=4).transpose(0, 3, 1, 2, 4, 5)
        minima = np.ascontiguousarray(groups[:, :, -2 * PANEL :]).view(np.float16).astype(np.float32)
    at = PANEL * GROUP if format_ == Format.INT8 else PANEL * GROUP // 2
    scales = np.ascontiguousarray(groups[:, :, at : at + 2 * PANEL]).view(np.float16).astype(np.float32)
    whole = whole.reshape(panels, PANEL, -1, GROUP).astype(np.float32)
    values = whole * scales.transpose(0, 2, 1)[..., None] + minima.transpose(0, 2, 1)[..., None]
    return values.reshape(panels * PANEL, -1)[: part.rows]


def by_groups(values: Floats) -> Floats:
    return values.reshape(len(values), -1, GROUP)


def normal(rows: int, columns: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).normal(0, 0.05, (rows, columns)).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(TORCH.values())), st.sampled_from(list(TORCH)), st.integers(1, 40), st.integers(1, 70),
    st.sampled_from(VARIANTS), st.integers(0, 10**6),
)
def test_floats_are_what_torch_makes_of_them(
    stored: torch.dtype, format_: Format, rows: int, columns: int, variant: str, seed: int
) -> None:
    values = torch.from_numpy(normal(rows, columns + 3, seed)).to(stored)[:, 2 : 2 + columns]  # rows with a stride
    got = unpack(Library(variant), Dense.of(values, format_))
    assert np.array_equal(got, values.to(TORCH[format_]).float().numpy())


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(TORCH.values())), st.integers(1, 40), st.integers(1, 4), st.sampled_from([1e-5, 0.05, 30.0]),
    st.sampled_from(VARIANTS), st.integers(0, 10**6),
)
def test_8_bits_are_the_nearest_of_their_scale(
    stored: torch.dtype, rows: int, groups: int, size: float, variant: str, seed: int
) -> None:
    values = torch.from_numpy(normal(rows, groups * GROUP, seed) * np.float32(20 * size)).to(stored)
    got, expected = by_groups(unpack(Library(variant), Dense.of(values, Format.INT8))), by_groups(values.float().numpy())
    step = np.abs(expected).max(-1, keepdims=True) / 127
    # Half a step, and what half precision adds to the scale: 2^-11 of it, or the distance of its smallest numbers.
    assert (np.abs(got - expected) <= 0.5 * step + np.abs(expected) * 5e-4 + np.maximum(step * 1e-3, 3.1e-8)).all()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 40), st.integers(1, 4), st.sampled_from([1e-3, 0.05, 30.0]), st.sampled_from(VARIANTS), st.integers(0, 10**6)
)
def test_4_bits_are_no_worse_than_the_plain_range(rows: int, groups: int, size: float, variant: str, seed: int) -> None:
    values = normal(rows, groups * GROUP, seed) * np.float32(20 * size)
    got = unpack(Library(variant), Dense.of(torch.from_numpy(values), Format.INT4))
    kind = gguf.GGMLQuantizationType.Q4_1  # from the smallest to the largest value
    plain = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    error, bound = (np.square(by_groups(made) - by_groups(values)).sum(-1) for made in (got, plain))
    assert (error <= bound * 1.001 + 1e-12).all()


def test_4_bits_by_least_squares_gain_a_tenth(library: Library) -> None:
    values = normal(64, 1024)
    got = unpack(library, Dense.of(torch.from_numpy(values), Format.INT4))
    kind = gguf.GGMLQuantizationType.Q4_1
    plain = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    assert np.square(got - values).sum() < 0.9 * np.square(plain - values).sum()


@pytest.mark.parametrize(("kind", "format_"), [("Q4_1", Format.INT4), ("Q8_0", Format.INT8)])
def test_what_lies_on_a_grid_stays_there(kind: str, format_: Format, library: Library) -> None:
    to = gguf.GGMLQuantizationType[kind]
    values = gguf.quants.dequantize(gguf.quants.quantize(normal(32, 256), to), to).astype(np.float32)
    assert np.array_equal(unpack(library, Dense.of(torch.from_numpy(values), format_)), values)


@pytest.mark.parametrize("format_", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_so(format_: Format, bad: float, library: Library) -> None:
    values = normal(18, 64)
    values[17, 40] = bad
    got = unpack(library, Dense.of(torch.from_numpy(values), format_))
    assert not np.isfinite(got[17, 32:]).any()
    assert np.isfinite(got[:17]).all()


@pytest.mark.parametrize("format_", [Format.INT8, Format.INT4])
def test_equal_values_and_zeros(format_: Format, library: Library) -> None:
    values = np.zeros((4, 64), dtype=np.float32)
    values[1], values[2, 32:] = 0.75, -0.5
    assert np.allclose(unpack(library, Dense.of(torch.from_numpy(values), format_)), values, rtol=1e-3, atol=0)


def test_pieces_and_missing_rows(library: Library) -> None:
    """A matrix is read some rows at a time; rows that the file does not have are zeros."""
    values, asked = torch.from_numpy(normal(2 * PIECE_ROWS + 5, 32)), []

    def read(rows: range) -> torch.Tensor:
        asked.append(rows)
        return values[rows.start : rows.stop]

    part = with_zero_rows(Dense(len(values), 32, Format.FLOAT32, read, len(values)), 20)
    assert np.array_equal(unpack(library, part), F.pad(values, (0, 0, 0, 20)).numpy())
    assert asked == [range(0, PIECE_ROWS), range(PIECE_ROWS, 2 * PIECE_ROWS), range(2 * PIECE_ROWS, len(values))]


def test_q4_k_keeps_its_values(library: Library) -> None:
    """But for its groups' scales and minima, which are products and are rounded to half precision."""
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (21, 3 * 144), dtype=np.uint8)
    blocks = raw.reshape(-1, 144)
    blocks[:, :4] = rng.uniform(1e-4, 1e-2, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    expected = dequantize(raw.reshape(-1), Q4_K).reshape(21, -1)
    order = np.array([20, -1, *range(19)])
    got = unpack(library, Blocks(Q4_K, raw, order, 5, 17))  # from within a block to within another
    wanted = np.where(order[:, None] < 0, 0, expected[order])[:, 5 * GROUP : 22 * GROUP]
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()
    assert np.corrcoef(got.ravel(), wanted.ravel())[0, 1] > 0.999999


@pytest.mark.parametrize("format_", list(Format))
def test_products_see_what_was_packed(format_: Format, library: Library) -> None:
    values = torch.from_numpy(normal(50, 96))
    part = Dense.of(values, format_)
    backend = CpuBackend(Alone(), library, 1, OWN)
    x = torch.from_numpy(normal(9, 96, 2)) * 20
    got = backend._linear(x, None, backend.pack_linear([part]))
    kind = {Format.INT8: "q8_0", Format.INT4: "q4_1"}.get(format_, "float32")
    assert torch.allclose(got, F.linear(rounded(x, kind), torch.from_numpy(unpack(library, part))), atol=2e-4)


@pytest.mark.parametrize("format_", [Format.BFLOAT16, Format.FLOAT16])
@pytest.mark.parametrize("columns", [96, 299])
def test_16_bits_give_the_sums_of_the_same_weights_in_32(format_: Format, columns: int, library: Library) -> None:
    values, x = torch.from_numpy(normal(50, columns)).to(TORCH[format_]), torch.from_numpy(normal(13, columns, 2))
    backend = CpuBackend(Alone(), library, 2, OWN)
    narrow, wide = (backend.pack_linear([Dense.of(v, f)]) for v, f in ((values, format_), (values.float(), Format.FLOAT32)))
    assert torch.equal(backend._linear(x, None, narrow), backend._linear(x, None, wide))
    Library().set_threads(1)


def test_bytes_are_counted_and_read() -> None:
    backend = CpuBackend(Alone(), Library(), 1, BY_QUANTIZE["q4"])
    values = torch.from_numpy(normal(64, 64))
    backend.pack_linear([Dense.of(values, Format.INT4), Dense.of(values, Format.INT4)])
    backend.pack_linear([Dense.of(values, Format.INT8)])
    assert backend.packed == {"q4": 2 * 64 * 2 * 20, "int8": 64 * 2 * 34}
    waits: list[int] = []
    assert backend.read_rate(lambda: waits.append(1)) > 1e6
    assert waits == [1, 1]


# Which format a matrix gets


@pytest.mark.parametrize(
    ("kind", "own", "int8", "q4", "q4_head"),
    [
        ("F32", "float32", "int8", "q4", "int8"), ("BF16", "bfloat16", "int8", "q4", "int8"),
        ("F16", "float16", "int8", "q4", "int8"), ("Q8_0", "int8", "int8", "q4", "int8"),
        ("Q6_K", "int8", "int8", "q4", "int8"), ("Q5_0", "int8", "int8", "q4", "int8"),
        ("Q4_K", "q4", "q4", "q4", "q4"), ("Q4_0", "q4", "q4", "q4", "q4"),
    ],
)
def test_formats_of_tensor_types(kind: str, own: str, int8: str, q4: str, q4_head: str) -> None:
    number = int(gguf.GGMLQuantizationType[kind])
    assert OWN.format_of(number).label == own
    assert BY_QUANTIZE["int8"].format_of(number).label == int8
    assert BY_QUANTIZE["q4"].format_of(number).label == q4
    assert BY_QUANTIZE["q4"].format_of(number, head=True).label == q4_head
    assert EXACT.format_of(number) == Format.FLOAT32
    assert BY_QUANTIZE["q4"].format_of(number, whole_groups=False).label == (own if kind in ("BF16", "F16") else "float32")
