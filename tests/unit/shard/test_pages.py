"""Pages of the KV cache that are ready before they are written."""

from __future__ import annotations

import mmap
import resource
import time

import pytest
import torch

from headrace_shard.kv import pages
from headrace_shard.kv.pages import PagesAhead

PAGE = 4096
BLOCK = 64 * PAGE
BLOCKS = 48


def make_cache() -> torch.Tensor:
    """A cache [blocks, bytes] that nobody has written; of small pages, so that they can be counted."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(BLOCKS, BLOCK)


def faults_of_writing(cache: torch.Tensor, first: int, count: int) -> int:
    """Page faults that writing to some blocks costs."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for block in cache[first : first + count]:
        block[::PAGE] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def wait_until_ready(ahead: PagesAhead, size: int) -> None:
    end = time.monotonic() + 30
    while ahead.ready < size:
        assert time.monotonic() < end, f"{ahead.ready} of {size} bytes are ready"
        time.sleep(0.01)


def test_pages_are_ready_as_far_ahead_as_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "AHEAD", 16 * BLOCK)
    cache = make_cache()
    ahead = PagesAhead(cache)
    wait_until_ready(ahead, 16 * BLOCK)
    time.sleep(0.05)
    assert ahead.ready == 16 * BLOCK
    assert faults_of_writing(cache, 0, 16) < 64 < 16 * 64 <= faults_of_writing(cache, 16, 16)
    ahead.reach(23)
    wait_until_ready(ahead, 40 * BLOCK)
    assert ahead.ready == 40 * BLOCK
    assert faults_of_writing(cache, 32, 8) < 64 < 8 * 64 <= faults_of_writing(cache, 40, 8)
    ahead.reach(BLOCKS - 1)
    wait_until_ready(ahead, cache.nbytes)


def test_a_system_that_cannot_be_asked_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "POPULATE_WRITE", 9999)
    cache = make_cache()
    ahead = PagesAhead(cache)
    ahead.reach(BLOCKS - 1)
    time.sleep(0.05)
    assert ahead.ready == 0
    assert faults_of_writing(cache, 0, BLOCKS) >= BLOCKS * 64
