"""The watermark of Kirchenbauer et al. 2023 (https://arxiv.org/abs/2301.10226), with TGI's key and defaults.

The token before seeds a permutation of the vocabulary; its first part is the green list, which generation prefers. Who
knows the key counts green tokens in a text: an unmarked one has about `gamma` of them.
"""

from __future__ import annotations

import torch

HASH_KEY = 15485863


def green_list(previous: int, vocab_size: int, gamma: float) -> torch.Tensor:
    """[gamma * vocab] ids that are preferred after the token `previous`. Drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(HASH_KEY * previous)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)]
