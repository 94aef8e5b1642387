"""Passes over whole rows of logits: what a step with plain requests spends its sampling time on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Passes(Protocol):
    """Passes over logits [rows, vocab], float32. A row's result does not depend on the rows beside it."""

    def scan(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row the largest logit's place, and the log of the sum of exp; not finite if a logit is NaN or inf."""

    def draw(self, logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The token of each row [rows] at which softmax(logits / temperature), summed in the order of ids, passes the
        row's number.

        Args:
            temperatures: [rows], float32.
            numbers: [rows], float64, from [0, 1).
        """

    def mask(self, logits: torch.Tensor, places: Sequence[int], bits: npt.NDArray[np.uint32]) -> None:
        """Make -inf, in the rows of `logits` at `places`, the tokens that have no bit in the same row of bits [places, words];
        the lowest bit of a word is its first token's. Tokens beyond the bits have none.
        """

    def threshold(self, scores: torch.Tensor, weights: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        """[rows] the largest t at which the weights of scores >= t are at least the row's mass, or all there is.

        Args:
            scores, weights: [rows, n], float32; a score of -inf has no weight.
            masses: [rows].
        """


class TorchPasses:
    """The plain way, on every device."""

    def scan(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits.logsumexp(-1)

    def draw(self, logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        scaled = logits / temperatures[:, None]
        return invert(scaled, scaled > -torch.inf, numbers[:, None])[:, 0]

    def mask(self, logits: torch.Tensor, places: Sequence[int], bits: npt.NDArray[np.uint32]) -> None:
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
        at = torch.tensor(places, device=logits.device)
        logits[at] = logits[at].masked_fill(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def threshold(self, scores: torch.Tensor, weights: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        # Bisection over the ordered bit patterns of float32: 32 sums find the exact score, no sort is needed.
        bits, mass = _ordered(scores), masses.double()[:, None]
        low = torch.full_like(mass, -(2**31), dtype=torch.int64)
        high = bits.amax(-1, keepdim=True) + 1
        goal = torch.minimum(mass, weights.sum(-1, keepdim=True, dtype=torch.float64))
        while bool((high - low > 1).any()):
            middle = (low + high) >> 1
            enough = torch.where(bits >= middle, weights, 0).sum(-1, keepdim=True, dtype=torch.float64) >= goal
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return _unordered(low)[:, 0]


_CHUNK = 64
_LEAST = -80.0  # exp of less is no normal float32


def invert(values: torch.Tensor, keep: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """[rows, 1] place of the drawn token among the kept columns of scaled logits [rows, tokens].

    In two stages, sums of chunks first, so that a whole vocabulary costs one pass and rounding stays at 1e-7.
    """
    # exp is many times slower where its result is no normal number; whatever is that small is never drawn.
    p = torch.where(keep, (values - values.amax(-1, keepdim=True)).clamp_min(_LEAST).exp(), 0)
    p = torch.nn.functional.pad(p, (0, -p.shape[1] % _CHUNK)).view(len(p), -1, _CHUNK)
    sums = p.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    goal = u * cumulative[:, -1:]
    chunk = torch.minimum(torch.searchsorted(cumulative, goal, right=True), _last_positive(sums))
    goal = goal - (cumulative - sums).gather(1, chunk)
    inner = p.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0].double()
    place = torch.minimum(torch.searchsorted(inner.cumsum(-1), goal, right=True), _last_positive(inner))
    return chunk * _CHUNK + place


def _last_positive(p: torch.Tensor) -> torch.Tensor:
    """[rows, 1] the last column above 0: rounding must not run past it."""
    return p.shape[1] - 1 - (p > 0).flip(-1).int().argmax(-1, keepdim=True)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """float32 as int64 that sort the same way."""
    raw = (x + 0.0).view(torch.int32).long()  # + 0.0: one zero only
    return torch.where(raw >= 0, raw, -(2**31) - raw - 1)


def _unordered(x: torch.Tensor) -> torch.Tensor:
    raw = torch.where(x >= 0, x, -(2**31) - x - 1).to(torch.int32)
    return raw.view(torch.float32)
