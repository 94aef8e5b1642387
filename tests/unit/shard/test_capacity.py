"""The memory arithmetic and its refusals."""

from __future__ import annotations

import pytest

from headrace._common.errors import StartupError
from headrace_shard.kv.capacity import DRAFT_ROWS, free_memory, limits
from headrace_shard.settings import ShardSettings

GIB = 2**30


def test_a_quarter_of_free_memory_is_taken() -> None:
    found = limits(ShardSettings(), 8192, 1024, GIB, 256)
    assert found.blocks == GIB // 4 // (16 * 1024)
    assert found.max_total_tokens == 8192
    assert found.max_input_tokens == 8191
    assert "25% of 1.0 GiB" in found.explanation


def test_no_more_is_taken_than_rows_can_fill() -> None:
    found = limits(ShardSettings(max_total_tokens=512), 8192, 1, GIB, 4)
    assert found.blocks == 4 * 512 // 16
    assert "4 requests of 512 tokens" in found.explanation


def test_the_window_shrinks_to_the_cache_unless_it_was_asked_for() -> None:
    assert limits(ShardSettings(max_batch_total_tokens=160), 8192, 1, GIB, 4).max_total_tokens == 160
    with pytest.raises(StartupError, match=r"--max-total-tokens 500 does not fit .* 160 tokens"):
        limits(ShardSettings(max_batch_total_tokens=160, max_total_tokens=500), 8192, 1, GIB, 4)


def test_the_draft_model_has_a_share() -> None:
    bytes_, block = GIB // 4, 16 * 1024  # of a token in the model's cache: 1 KiB; in the draft model's a quarter of that
    found = limits(ShardSettings(max_total_tokens=256), 8192, 1024, GIB, 10_000, 256)
    assert found.draft_blocks == DRAFT_ROWS * 16
    assert found.blocks == (bytes_ - found.draft_blocks * block // 4) // block
    assert "2048 tokens for the draft model" in found.explanation
    found = limits(ShardSettings(), 1 << 20, 1024, GIB, 256, 256)  # eight such requests would take all
    assert found.draft_blocks == found.blocks == bytes_ // (block + block // 4)
    assert limits(ShardSettings(max_batch_total_tokens=320), 8192, 1024, GIB, 4, 256).draft_blocks == 20
    assert limits(ShardSettings(), 8192, 1024, GIB, 256).draft_blocks == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ShardSettings(max_total_tokens=9000), "9000 is more than the model's window of 8192"),
        (ShardSettings(max_input_tokens=64, max_total_tokens=64), "64 must be less than --max-total-tokens 64"),
    ],
)
def test_refusals_name_both_numbers(settings: ShardSettings, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        limits(settings, 8192, 1024, GIB, 256)


def test_free_memory_is_less_than_the_machine_has() -> None:
    assert 0 < free_memory() < 2**45
