"""The CPU kernels against plain torch, over odd shapes and both instruction sets; a row never depends on its company."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_shard.backends import choose_backend
from headrace_shard.backends.base import AttentionShape
from headrace_shard.backends.cpu_backend import CpuBackend
from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.kernels import build as building
from headrace_shard.kernels.library import Library
from headrace_shard.parallel.group import Alone
from headrace_shard.sampling.passes import TorchPasses
from headrace_shard.step import Chunk, StepInput
from headrace_shard.weights.precision import EXACT, OWN, Format
from headrace_shard.weights.source import Blocks, Dense

CPU = torch.device("cpu")
KINDS = {"q4_0": 2, "q4_1": 3, "q8_0": 8}
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = ["float32", *HALVES]
VARIANTS = ["amx", "avx512", "avx2", "portable"]
WEIGHTS = [*FLOATS, *KINDS]
FUZZ = int(os.environ.get("HEADRACE_TEST_FUZZ", "1"))  # times as many shapes

pytestmark = pytest.mark.skipif(
    building.compiler() is None and not building.library_path().exists(), reason="no compiler: torch serves here"
)


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    library = Library(request.param)
    if library.variant != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    library.set_threads(2)
    yield library
    Library().set_threads(1)


def make_weight(
    kind: str, rows: int, columns: int, rng: np.random.Generator
) -> tuple[torch.Tensor | Blocks | Dense, torch.Tensor]:
    """A matrix as a backend packs it, and its values [rows, columns]."""
    values = (rng.normal(0, 0.2, (rows, columns)) * rng.choice([1e-5, 1, 30], (rows, 1))).astype(np.float32)
    if kind == "float32":
        return torch.from_numpy(values), torch.from_numpy(values)
    if kind in HALVES:
        stored = torch.from_numpy(values).to(HALVES[kind])
        return Dense.of(stored, Format[kind.upper()]), stored.float()
    to = gguf.GGMLQuantizationType(KINDS[kind])
    raw = gguf.quants.quantize(values, to)
    return (
        Blocks(KINDS[kind], raw, np.arange(rows), 0, columns // 32),
        torch.from_numpy(np.array(gguf.quants.dequantize(raw, to), dtype=np.float32)),
    )


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Activations as a product with such weights sees them."""
    if kind in FLOATS:
        return x
    most = 32767 if kind == "q8_0" else 127
    groups = x.view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / most
    return (torch.where(scale > 0, groups / scale, 0).round() * scale).view(x.shape)


def near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    """Whether the error stays below `bound` of the largest value of each column."""
    return bool(((got - expected).abs() <= bound * (expected.abs().amax(0) + 1e-6)).all())


@settings(deadline=None, max_examples=25 * FUZZ)
@given(
    st.sampled_from(WEIGHTS), st.integers(1, 60), st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(1, 9),
    st.booleans(), st.booleans(), st.sampled_from(VARIANTS), st.integers(1, 3), st.integers(0, 10**6),
)
def test_a_product_equals_its_twin(
    kind: str, rows: int, widths: list[int], groups: int, with_norm: bool, with_bias: bool, variant: str, threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    columns = groups * 32 if kind not in FLOATS else groups * 32 - seed % 31
    backend = CpuBackend(Alone(), Library(variant), threads, OWN)
    made = [make_weight(kind, width, columns, rng) for width in widths]
    bias = [torch.from_numpy(rng.normal(0, 1, width).astype(np.float32)) for width in widths] if with_bias else None
    packed = backend.pack_linear([m[0] for m in made], bias)
    x = torch.from_numpy(rng.normal(0, 1, (rows, columns)).astype(np.float32))
    norm = torch.from_numpy(rng.normal(1, 0.2, columns).astype(np.float32))
    got = backend._linear(x, backend.pack_norm(norm, 1e-5) if with_norm else None, packed)
    plain = F.rms_norm(x, (columns,), norm, 1e-5) if with_norm else x
    weight = torch.cat([m[1] for m in made]).double()
    expected = F.linear(rounded(plain, kind).double(), weight).float()
    if bias:
        expected += torch.cat(bias)
    # Sums may cancel, so that errors are measured against their terms. A value in the middle between two steps of the
    # rounding may go to either.
    bound = 1e-4 if kind == "q8_0" else 4e-3 if kind.startswith("q4") else 1e-5
    terms = F.linear(plain.double().abs(), weight.abs()).amax(0) + (torch.cat(bias).abs() if bias else 1e-6)
    assert bool(((got - expected).abs() <= bound * terms).all())


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_does_not_depend_on_its_company(kind: str, library: Library) -> None:
    rng = np.random.default_rng(3)
    backend = CpuBackend(Alone(), library, 2, OWN)
    packed = backend.pack_linear([make_weight(kind, 53, 96, rng)[0], make_weight(kind, 16, 96, rng)[0]])
    gate_up = backend.pack_linear([make_weight(kind, 64, 96, rng)[0], make_weight(kind, 64, 96, rng)[0]])
    down = backend.pack_linear([make_weight(kind, 96, 64, rng)[0]])
    norm = backend.pack_norm(torch.linspace(0.5, 1.5, 96), 1e-5)
    x = torch.from_numpy(rng.normal(0, 1, (230, 96)).astype(np.float32))
    whole = backend._linear(x, norm, packed)
    fed = backend.mlp(x.clone(), norm, gate_up, down)
    for begin, end in [(0, 1), (0, 2), (5, 8), (3, 7), (11, 16), (100, 107), (50, 58), (20, 29), (90, 230), (229, 230)]:
        assert torch.equal(backend._linear(x[begin:end].contiguous(), norm, packed), whole[begin:end])
        assert torch.equal(backend.mlp(x[begin:end].clone(), norm, gate_up, down), fed[begin:end])


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("inner", [32, 96])
def test_the_feed_forward_part_equals_its_twin(kind: str, inner: int, library: Library) -> None:
    rng = np.random.default_rng(inner)
    backend = CpuBackend(Alone(), library, 2, OWN)
    gate, up, down = (make_weight(kind, *size, rng) for size in ((inner, 64), (inner, 64), (64, inner)))
    weight, x = torch.ones(64), torch.from_numpy(rng.normal(0, 1, (19, 64)).astype(np.float32))
    norm, gate_up = backend.pack_norm(weight, 1e-5), backend.pack_linear([gate[0], up[0]])
    got = backend.mlp(x.clone(), norm, gate_up, backend.pack_linear([down[0]]))
    normed = rounded(F.rms_norm(x, (64,), weight, 1e-5), kind)
    between = rounded(F.silu(F.linear(normed, gate[1])) * F.linear(normed, up[1]), kind)
    assert near(got, x + F.linear(between, down[1]), 2e-3 if kind in (*FLOATS, "q8_0") else 3e-2)


def test_a_width_that_fills_no_panel(library: Library) -> None:
    rng = np.random.default_rng(1)
    backend = CpuBackend(Alone(), library, 2, OWN)
    gate, up, down = (torch.from_numpy(rng.normal(0, 0.2, s).astype(np.float32)) for s in ((27, 40), (27, 40), (40, 27)))
    biases = [torch.ones(27), torch.full((27,), -0.5)]
    x = torch.from_numpy(rng.normal(0, 1, (9, 40)).astype(np.float32))
    norm, gate_up = backend.pack_norm(torch.ones(40), 1e-5), backend.pack_linear([gate, up], biases)
    got = backend.mlp(x.clone(), norm, gate_up, backend.pack_linear([down]))
    normed = F.rms_norm(x, (40,), None, 1e-5)
    expected = x + F.linear(F.silu(F.linear(normed, gate, biases[0])) * F.linear(normed, up, biases[1]), down)
    assert torch.allclose(got, expected, atol=1e-5)


def test_rows_in_another_order_and_columns_of_a_slice(library: Library) -> None:
    rng = np.random.default_rng(2)
    backend = CpuBackend(Alone(), library, 1, OWN)
    blocks, values = make_weight("q4_1", 20, 160, rng)
    assert isinstance(blocks, Blocks)
    order = np.array([7, 3, -1, 19, 0])
    packed = backend.pack_linear([Blocks(blocks.kind, blocks.raw, order, 1, 3)])
    x = torch.from_numpy(rng.normal(0, 1, (4, 96)).astype(np.float32))
    expected = F.linear(rounded(x, "q4_1"), torch.where(torch.tensor(order)[:, None] < 0, 0, values[order])[:, 32:128])
    assert torch.allclose(backend._linear(x, None, packed), expected, atol=1e-2, rtol=1e-3)
    assert bool((backend._linear(x, None, packed)[:, 2] == 0).all())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    rng = np.random.default_rng(4)
    weight = make_weight("q4_0", 300, 64, rng)[0]
    x = torch.from_numpy(rng.normal(0, 1, (33, 64)).astype(np.float32))
    alone = CpuBackend(Alone(), Library(), 1, OWN)
    expected = alone._linear(x, None, alone.pack_linear([weight]))
    backend = CpuBackend(Alone(), Library(), threads, OWN)
    packed = backend.pack_linear([weight])

    def many(_: int) -> bool:
        return all(torch.equal(backend._linear(x, None, packed), expected) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:  # callers take turns
        assert all(pool.map(many, range(3)))
    Library().set_threads(1)


# Attention


class Sequence:
    """Tokens of one sequence in blocks that lie anywhere."""

    def __init__(self, length: int, blocks: list[int]) -> None:
        self.length, self.table = length, np.array(blocks[: -(-length // 16)], dtype=np.int32)

    def slots(self, begin: int, end: int) -> np.ndarray:
        at = np.arange(begin, end)
        return self.table[at // 16].astype(np.int64) * 16 + at % 16


def step_of(decode: list[tuple[Sequence, int]], chunks: list[tuple[Sequence, int, int]]) -> StepInput:
    """Decode rows (sequence, position), then chunks (sequence, begin, end)."""
    width = max((len(s.table) for s, _ in decode), default=0)
    tables = np.zeros((len(decode), width), dtype=np.int32)
    positions = [np.array([p for _, p in decode], dtype=np.int64)]
    slots, made, offset = [np.array([s.slots(p, p + 1)[0] for s, p in decode], dtype=np.int64)], [], len(decode)
    for row, (sequence, position) in enumerate(decode):
        tables[row, : position // 16 + 1] = sequence.table[: position // 16 + 1]
    for sequence, begin, end in chunks:
        made.append(Chunk(offset, end - begin, begin, sequence.table[: (end - 1) // 16 + 1]))
        positions.append(np.arange(begin, end))
        slots.append(sequence.slots(begin, end))
        offset += end - begin
    flat = np.concatenate(positions)
    return StepInput(
        np.zeros(offset, dtype=np.int64), flat, np.concatenate(slots), tables, positions[0] + 1, tuple(made),
        np.arange(offset, dtype=np.int64),
    )


def wider() -> Iterator[Library]:
    """AVX2's library and those of more, each in use until the next is asked for; the test is skipped if there is only one."""
    found = [variant for variant in ("avx2", "avx512", "amx") if Library(variant).variant == variant]
    if len(found) < 2:
        pytest.skip("this CPU has no wider vectors than AVX2's")
    return map(Library, found)


@pytest.mark.parametrize("rows", [1, 12, 13, 47, 100, 109, 150])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_instruction_set_multiplies_to_the_bits_of_avx2(kind: str, rows: int) -> None:
    """In a product, and in the activated ones of an MLP."""
    rng = np.random.default_rng(10)
    gate, up, down = (make_weight(kind, *size, rng)[0] for size in ((64, 96), (64, 96), (96, 64)))
    x = torch.from_numpy(rng.normal(0, 1, (rows, 96)).astype(np.float32))
    norm = torch.from_numpy(rng.normal(1, 0.2, 96).astype(np.float32))
    given_bits = []
    for library in wider():
        backend = CpuBackend(Alone(), library, 2, OWN)
        packed = backend.pack_norm(norm, 1e-5)
        product = backend._linear(x, packed, backend.pack_linear([gate, up]))
        mlp = backend.mlp(x.clone(), packed, backend.pack_linear([gate, up]), backend.pack_linear([down]))
        given_bits.append((product.clone(), mlp.clone()))
    assert all(torch.equal(got, first) for both in given_bits for got, first in zip(both, given_bits[0], strict=True))


def attend(backend: TorchBackend, shape: AttentionShape, steps: list[tuple[StepInput, torch.Tensor]]) -> list[torch.Tensor]:
    backend.allocate_kv(1, 40, shape)
    out = []
    for step, qkv in steps:
        backend.begin(step, 1.0 / 100.0 ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        out.append(backend.attention(qkv.clone(), 0, shape).clone())
    return out


@settings(deadline=None, max_examples=25 * FUZZ)
@given(
    st.sampled_from([(1, 1), (3, 1), (9, 3), (4, 2), (8, 8), (14, 2)]), st.sampled_from([16, 48, 64]),
    st.sampled_from([None, 1, 9, 33]), st.booleans(), st.sampled_from(VARIANTS), st.integers(0, 10**6),
)
def test_attention_equals_its_twin(
    heads: tuple[int, int], dim: int, window: int | None, own: bool, variant: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = AttentionShape(*heads, dim, window)
    blocks = (rng.permutation(40) + 1).tolist()
    first, second, third = Sequence(70, blocks[:5]), Sequence(40, blocks[5:8]), Sequence(17, blocks[8:10])
    cut = int(rng.integers(1, 69))
    steps = [
        step_of([], [(first, 0, cut), (second, 0, 39)]), step_of([(second, 39)], [(first, cut, 70), (third, 0, 16)]),
        step_of([(third, 16), (first, 69)], []),
    ]
    given_rows = [
        (s, torch.from_numpy(rng.normal(0, 1, (len(s.token_ids), (heads[0] + 2 * heads[1]) * dim)).astype(np.float32)))
        for s in steps
    ]
    expected = attend(TorchBackend(torch.float32, CPU, Alone()), shape, given_rows)
    got = attend(CpuBackend(Alone(), Library(variant), 2, OWN if own else EXACT), shape, given_rows)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < (4e-3 if own else 1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("heads", [(9, 3), (2, 2), (7, 1)])
def test_every_instruction_set_attends_to_the_bits_of_avx2(heads: tuple[int, int], own: bool) -> None:
    rng = np.random.default_rng(9)
    shape = AttentionShape(*heads, 48, None)
    rows = torch.from_numpy(rng.normal(0, 1, (62, (heads[0] + 2 * heads[1]) * 48)).astype(np.float32))
    ours = Sequence(62, [9, 2, 30, 4])
    steps = [(step_of([], [(ours, 0, 61)]), rows[:61]), (step_of([(ours, 61)], []), rows[61:])]
    precision = OWN if own else EXACT
    given_bits = [torch.cat(attend(CpuBackend(Alone(), library, 2, precision), shape, steps)) for library in wider()]
    assert all(torch.equal(got, given_bits[0]) for got in given_bits)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("heads", [(9, 3), (2, 2), (7, 1)])
def test_attention_does_not_depend_on_chunks_or_mates(heads: tuple[int, int], own: bool, library: Library) -> None:
    rng = np.random.default_rng(6)
    shape, length = AttentionShape(*heads, 32, None), 61
    rows = torch.from_numpy(rng.normal(0, 1, (length, (heads[0] + 2 * heads[1]) * 32)).astype(np.float32))
    ours, other = Sequence(length, [9, 2, 30, 4]), Sequence(40, [11, 12, 1])
    mates = torch.from_numpy(rng.normal(0, 1, (40, rows.shape[1])).astype(np.float32))
    whole = attend(CpuBackend(Alone(), library, 2, OWN if own else EXACT), shape, [(step_of([], [(ours, 0, length)]), rows)])[0]
    pieces = [(step_of([], [(ours, a, b)]), rows[a:b]) for a, b in ((0, 1), (1, 8), (8, 30), (30, 60))]
    pieces.append((step_of([(ours, 60)], [(other, 0, 40)]), torch.cat((rows[60:], mates))))
    got = attend(CpuBackend(Alone(), library, 1, OWN if own else EXACT), shape, pieces)
    assert torch.equal(torch.cat([*got[:-1], got[-1][:1]]), whole)


@pytest.mark.parametrize("window", [None, 100, 140])
@pytest.mark.parametrize("own", [False, True])
def test_splits_of_long_contexts_are_added_in_one_order(own: bool, window: int | None, library: Library) -> None:
    """One chunk of 300 tokens, chunks that end beside the borders of splits, and single rows, alone or among others."""
    rng = np.random.default_rng(8)
    shape, length = AttentionShape(6, 2, 32, window), 300
    blocks = (rng.permutation(40) + 1).tolist()
    ours, other = Sequence(length, blocks[:19]), Sequence(129, blocks[19:28])
    rows, mates = (torch.from_numpy(rng.normal(0, 1, (n, 10 * 32)).astype(np.float32)) for n in (length, 129))
    steps = [(step_of([], [(ours, 0, length)]), rows)]
    whole = attend(CpuBackend(Alone(), library, 2, OWN if own else EXACT), shape, steps)[0]
    twin = attend(TorchBackend(torch.float32, CPU, Alone()), shape, steps)[0]
    assert (whole - twin).abs().max() < (4e-3 if own else 1e-5)
    cuts = [0, 1, 127, 128, 129, 255, 257, 298]
    pieces = [(step_of([], [(ours, a, b)]), rows[a:b]) for a, b in pairwise(cuts)]
    pieces.append((step_of([(ours, 298)], []), rows[298:299]))
    pieces.append((step_of([(ours, 299)], [(other, 0, 129)]), torch.cat((rows[299:], mates))))
    for threads in (1, 2, 3):
        got = attend(CpuBackend(Alone(), library, threads, OWN if own else EXACT), shape, pieces)
        assert torch.equal(torch.cat([*got[:-1], got[-1][:1]]), whole)


def test_what_a_row_may_not_see_cannot_reach_it(library: Library) -> None:
    """Left-over numbers of another request, not finite ones, lie in the same block behind the last token."""
    shape = AttentionShape(2, 1, 16)
    backend = CpuBackend(Alone(), library, 1, OWN)
    backend.allocate_kv(1, 4, shape)
    backend._cache[0].fill_(torch.nan)
    rows = torch.ones((5, 64))
    backend.begin(step_of([], [(Sequence(5, [1]), 0, 5)]), torch.ones(8))
    assert bool(torch.isfinite(backend.attention(rows, 0, shape)).all())


# Prompts, where they are computed otherwise


@pytest.fixture
def own_for_prompts() -> Iterator[Library]:
    library = Library()
    if not library.prompt_tile_rows:
        pytest.skip("this CPU computes prompts as everything else")
    yield library
    library.set_threads(1)


def to_brains(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16, in double precision."""
    return x.bfloat16().double()


@settings(deadline=None, max_examples=25 * FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(list(KINDS)), st.integers(1, 600), st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 10**6),
)
def test_a_product_of_a_prompt_equals_its_twin(
    own_for_prompts: Library, kind: str, rows: int, widths: list[int], groups: int, with_norm: bool, with_bias: bool,
    threads: int, seed: int,
) -> None:
    rng, columns = np.random.default_rng(seed), groups * 32
    backend = CpuBackend(Alone(), own_for_prompts, threads, OWN)
    made = [make_weight(kind, width, columns, rng) for width in widths]
    bias = [torch.from_numpy(rng.normal(0, 1, width).astype(np.float32)) for width in widths] if with_bias else None
    packed = backend.pack_linear([m[0] for m in made], bias)
    x = torch.from_numpy(rng.normal(0, 1, (rows, columns)).astype(np.float32))
    norm = torch.from_numpy(rng.normal(1, 0.2, columns).astype(np.float32))
    got = backend._linear(x, backend.pack_norm(norm, 1e-5) if with_norm else None, packed, prompts=rows)
    plain = F.rms_norm(x, (columns,), norm, 1e-5) if with_norm else x
    weight = torch.cat([m[1] for m in made])
    expected = F.linear(to_brains(plain), to_brains(weight)).float()
    if bias:
        expected += torch.cat(bias)
    # Weights near the middle between two of bfloat16 may go to the other one.
    terms = F.linear(plain.double().abs(), weight.double().abs()) + (torch.cat(bias).abs() if bias else 1e-6)
    assert bool(((got - expected).abs() <= 2**-7 * terms).all())
    whole = F.linear(plain.double(), weight.double()) + (torch.cat(bias) if bias else 0.0)
    scale = F.linear(plain.double() ** 2, weight.double() ** 2).sqrt().norm()
    assert (got - whole).norm() <= 1e-2 * scale + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_prompt_depends_on_nothing_else(kind: str, own_for_prompts: Library) -> None:
    """Neither on other rows of prompts nor on generated tokens, nor these on it."""
    rng = np.random.default_rng(3)
    backend = CpuBackend(Alone(), own_for_prompts, 2, OWN)
    packed = backend.pack_linear([make_weight(kind, 53, 480, rng)[0], make_weight(kind, 16, 480, rng)[0]])
    gate_up = backend.pack_linear([make_weight(kind, 64, 480, rng)[0], make_weight(kind, 64, 480, rng)[0]])
    down = backend.pack_linear([make_weight(kind, 480, 64, rng)[0]])
    norm = backend.pack_norm(torch.linspace(0.5, 1.5, 480), 1e-5)
    x = torch.from_numpy(rng.normal(0, 1, (600, 480)).astype(np.float32))

    def both(begin: int, end: int, prompts: int) -> torch.Tensor:
        backend._prompts = prompts
        product = backend._linear(x[begin:end].contiguous(), norm, packed)
        return torch.cat((product, backend.mlp(x[begin:end].clone(), norm, gate_up, down)), 1)

    of_prompts, generated = both(0, 600, 600), both(0, 600, 0)
    assert not torch.equal(of_prompts, generated)
    for begin, end in [(0, 1), (5, 8), (3, 7), (11, 27), (100, 133), (50, 90), (90, 400), (100, 600), (599, 600)]:
        for prompts in (end - begin, (end - begin) // 2, 1):
            got, cut = both(begin, end, prompts), end - prompts
            assert torch.equal(got, torch.cat((generated[begin:cut], of_prompts[cut:end])))


@pytest.mark.parametrize("kind", KINDS)
def test_the_mlp_of_a_prompt_equals_its_twin(kind: str, own_for_prompts: Library) -> None:
    rng = np.random.default_rng(7)
    backend = CpuBackend(Alone(), own_for_prompts, 2, OWN)
    gate, up, down = make_weight(kind, 96, 64, rng), make_weight(kind, 96, 64, rng), make_weight(kind, 64, 96, rng)
    x = torch.from_numpy(rng.normal(0, 1, (70, 64)).astype(np.float32))
    backend._prompts = 70
    gate_up = backend.pack_linear([gate[0], up[0]])
    got = backend.mlp(x.clone(), backend.pack_norm(torch.ones(64), 1e-5), gate_up, backend.pack_linear([down[0]]))
    normed = to_brains(F.rms_norm(x, (64,), torch.ones(64), 1e-5))
    between = to_brains(F.silu(F.linear(normed, to_brains(gate[1]))) * F.linear(normed, to_brains(up[1])))
    expected = x + F.linear(between, to_brains(down[1])).float()
    assert near(got, expected, 2e-2)


def prompt_backend(library: Library, threads: int) -> CpuBackend:
    """One that tells prompts apart: it has weights in integers."""
    backend = CpuBackend(Alone(), library, threads, OWN)
    backend.pack_linear([make_weight("q4_1", 16, 32, np.random.default_rng(1))[0]])
    assert backend.prompts_differ
    return backend


def as_prompts(step: StepInput) -> StepInput:
    """Its chunks as those of prompts."""
    return replace(step, prompts=sum(chunk.length for chunk in step.chunks))


@pytest.mark.parametrize("window", [None, 33, 140])
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((2, 2), 32), ((14, 2), 96), ((7, 1), 128), ((40, 1), 32)])
def test_attention_of_a_prompt_equals_its_twin_and_depends_on_nothing_else(
    heads: tuple[int, int], dim: int, window: int | None, own_for_prompts: Library
) -> None:
    """One chunk of 300 tokens; chunks that end within blocks and splits, beside others; a last token generated."""
    rng = np.random.default_rng(8)
    shape, length = AttentionShape(*heads, dim, window), 300
    blocks = (rng.permutation(40) + 1).tolist()
    ours, other = Sequence(length, blocks[:19]), Sequence(129, blocks[19:28])
    width = (heads[0] + 2 * heads[1]) * dim
    rows, mates = (torch.from_numpy(rng.normal(0, 1, (n, width)).astype(np.float32)) for n in (length, 129))
    whole_step = step_of([], [(ours, 0, length)])
    twin = attend(TorchBackend(torch.float32, CPU, Alone()), shape, [(whole_step, rows)])[0]
    whole = attend(prompt_backend(own_for_prompts, 2), shape, [(as_prompts(whole_step), rows)])[0]
    assert (whole - twin).norm() < 5e-3 * twin.norm()
    assert (whole - twin).abs().max() < 3e-2
    pieces = [(as_prompts(step_of([], [(ours, a, b)])), rows[a:b]) for a, b in pairwise([0, 1, 16, 100, 127, 129, 257, 298])]
    pieces.append((as_prompts(step_of([], [(ours, 298, 299), (other, 0, 129)])), torch.cat((rows[298:299], mates))))
    pieces.append((as_prompts(step_of([(ours, 299)], [])), rows[299:]))
    for threads in (1, 3):
        got = attend(prompt_backend(own_for_prompts, threads), shape, pieces)
        assert torch.equal(torch.cat([*got[:-2], got[-2][:1]]), whole[:299])
        assert (got[-1] - twin[299:]).abs().max() < 6e-3  # its own query is not rounded, nor its own key


def test_what_a_prompts_row_may_not_see_cannot_reach_it(own_for_prompts: Library) -> None:
    shape = AttentionShape(2, 1, 32)
    backend = prompt_backend(own_for_prompts, 1)
    backend.allocate_kv(1, 4, shape)
    backend._cache[0].fill_(torch.nan)
    backend.begin(as_prompts(step_of([], [(Sequence(5, [1]), 0, 5)])), torch.ones(16))
    assert bool(torch.isfinite(backend.attention(torch.ones((5, 128)), 0, shape)).all())


# Passes over logits


@settings(deadline=None, max_examples=40 * FUZZ)
@given(
    st.integers(1, 9), st.integers(1, 20000), st.sampled_from(VARIANTS), st.integers(1, 3), st.integers(0, 10**6)
)
def test_passes_over_logits_equal_their_twins(rows: int, vocab: int, variant: str, threads: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + 3, generator=rng)[:, :vocab] * 4
    logits[0, seed % vocab] = -torch.inf if vocab > 1 else 0.0
    library, plain = Library(variant), TorchPasses()
    library.set_threads(threads)
    best, log_sums = library.scan(logits)
    assert torch.equal(logits.gather(1, best[:, None])[:, 0], logits.amax(-1))
    assert torch.allclose(log_sums, logits.double().logsumexp(-1).float(), atol=1e-5)
    temperatures = torch.rand(rows, generator=rng) + 0.2
    numbers = torch.rand(rows, generator=rng, dtype=torch.float64)
    tokens = library.draw(logits, temperatures, numbers)
    cumulative = (logits / temperatures[:, None]).double().softmax(-1).cumsum(-1)
    drawn = cumulative.gather(1, tokens[:, None])[:, 0]
    before = drawn - (logits / temperatures[:, None]).double().softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert bool(((before <= numbers + 1e-5) & (numbers - 1e-5 <= drawn)).all())
    assert tokens.tolist() == plain.draw(logits, temperatures, numbers).tolist() or vocab > 100
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, max((vocab + 31) // 32 + seed % 3 - 1, 1)), dtype=np.uint32)
    bits[:, ::3], places = np.uint32(2**32 - 1), list(range(0, rows, 2))
    masked, twin = logits.clone(), logits.clone()
    library.mask(masked, places, bits[places])
    plain.mask(twin, places, bits[places])
    assert torch.equal(masked, twin)
    for row in range(rows):  # alone as in company
        one = slice(row, row + 1)
        assert library.draw(logits[one], temperatures[one], numbers[one]).tolist() == tokens[one].tolist()
        assert torch.equal(torch.stack(library.scan(logits[one])), torch.stack((best[one], log_sums[one])))
    library.set_threads(1)


def test_the_first_of_equal_logits_is_the_best(library: Library) -> None:
    logits = torch.zeros(3, 9000)
    logits[1, [5000, 700, 4200]] = logits[2, [8999]] = 2.0
    assert library.scan(logits)[0].tolist() == [0, 700, 8999]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_show(value: float, library: Library) -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4500] = value
    assert library.scan(logits)[1].isfinite().tolist() == [True, False, True]
    logits[2] = -torch.inf
    assert not library.scan(logits)[1][2].isfinite()


# Without a compiler


def test_without_a_compiler_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    monkeypatch.setattr(building, "compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        backend = choose_backend(OWN, CPU, Alone(), 1)
    assert isinstance(backend, TorchBackend)
    assert not isinstance(backend, CpuBackend)
    assert backend.precision == EXACT
    assert [record.getMessage().count("no C++ compiler found") for record in caplog.records] == [1]


def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An older one refuses AMX; here a stand-in does, which writes down what it is asked to do."""
    monkeypatch.setattr(building, "is_x86", lambda: True)
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    older, calls = tmp_path / "c++", tmp_path / "calls"
    older.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\n'
        f'echo "$*" >> {calls}\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done\n'
    )
    older.chmod(0o755)
    building._compile(str(older), tmp_path / "libheadrace-test.so")
    assert (tmp_path / "libheadrace-test.so").exists()
    compiled = [line for line in calls.read_text().splitlines() if " -c " in line]
    assert sum("-DVARIANT=avx512" in line for line in compiled) == 1
    [chooser] = [line for line in compiled if "library.cpp" in line]
    assert "-DHEADRACE_HAS_AVX2" in chooser
    assert "-DHEADRACE_HAS_AVX512" in chooser
    assert "AMX" not in chooser


def test_what_the_compiler_says_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses = tmp_path / "c++"
    refuses.write_text("#!/bin/sh\necho 'a.cpp:1: error: no such thing' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(building, "FOLDER", tmp_path)
    monkeypatch.setattr(building, "compiler", lambda: str(refuses))
    with pytest.raises(building.BuildFailed, match=r"^the C\+\+ compiler ended with status 1: a.cpp:1: error: no such thing$"):
        building.build()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".build")] == []
