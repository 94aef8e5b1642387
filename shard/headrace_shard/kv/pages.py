"""Pages of the KV cache, made before a step writes to them.

The system hands out memory when it is first written, and clears it then: on a new server that took a quarter of a prompt's
time. Here a thread does it ahead of need, so that memory still grows only as far as it is used.

The thread has no lower priority than others: one that waits for a core while it holds the interpreter's lock holds up steps.
"""

from __future__ import annotations

import ctypes
import threading

import torch

AHEAD = 128 << 20  # bytes that are ready beyond the highest block in use
PIECE = 2 << 20  # one large page
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Linux 5.14


class PagesAhead:
    """Keeps the first pages of a cache ready. Where the system cannot be asked for that, pages come as they are written.

    `ready`: bytes of the cache, from its beginning on.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        """`cache` [blocks, ...] in one piece, which has not been written."""
        self._cache = cache  # its memory must not go while the thread is at it
        self._block_bytes, self._bytes = cache.stride(0) * cache.itemsize, cache.nbytes
        self.ready = 0
        self._wanted = min(AHEAD, self._bytes)
        self._more = threading.Event()
        self._more.set()
        threading.Thread(target=self._run, name="kv-pages", daemon=True).start()

    def reach(self, block: int) -> None:
        """A step writes to this block, and to none above it."""
        wanted = min(self._bytes, (block + 1) * self._block_bytes + AHEAD)
        if wanted >= self._wanted + PIECE:
            self._wanted = wanted
            self._more.set()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's own method this releases the GIL
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start = self._cache.data_ptr()
        while self.ready < self._bytes:
            self._more.wait()
            self._more.clear()
            while self.ready < self._wanted:
                size = min(PIECE, self._bytes - self.ready)
                if madvise(start + self.ready, size, POPULATE_WRITE):
                    return
                self.ready += size
