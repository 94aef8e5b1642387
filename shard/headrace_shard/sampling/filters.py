"""Which tokens may be drawn: top-k, top-p, typical-p, min-p, without ever sorting a vocabulary.

Most rows are decided on their best `CANDIDATES` tokens, found by an exact two-stage selection. A row whose filters
may keep more than those (or that has no filter) is decided on the whole vocabulary, by bisection for the threshold.
Both ways keep the same tokens: a filter keeps every token at or above a threshold, ties included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_shard.sampling.passes import Passes

CANDIDATES = 128
_CHUNK = 64


@dataclass(frozen=True)
class Filters:
    """Filter parameters of each row, [rows, 1] each. Off: top_k 0, top_p 1, typical_p 1, min_p 0."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor
    min_p: torch.Tensor

    @property
    def off(self) -> torch.Tensor:
        """[rows] whether the row has no filter at all."""
        return ((self.top_k == 0) & (self.top_p >= 1) & (self.typical_p >= 1) & (self.min_p == 0))[:, 0]

    def take(self, rows: torch.Tensor) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.typical_p[rows], self.min_p[rows])


def best(logits: torch.Tensor, count: int = CANDIDATES) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row and their ids, [rows, count], largest first.

    The vocabulary is cut into chunks: the best `count` values lie in the `count` chunks with the largest maxima.
    """
    rows, vocab = logits.shape
    chunks = vocab // _CHUNK
    if chunks <= count:
        return logits.topk(min(count, vocab), dim=-1)
    whole = logits[:, : chunks * _CHUNK].view(rows, chunks, _CHUNK)
    _, where = whole.amax(-1).topk(count, dim=-1)
    picked = whole.gather(1, where[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)
    ids = (where[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)).flatten(1)
    if vocab > chunks * _CHUNK:  # the rest that fills no chunk
        tail = torch.arange(chunks * _CHUNK, vocab, device=logits.device)
        picked = torch.cat((picked, logits[:, tail]), dim=1)
        ids = torch.cat((ids, tail.expand(rows, -1)), dim=1)
    values, at = picked.topk(count, dim=-1)
    return values, ids.gather(1, at)


def decided_by_candidates(values: torch.Tensor, log_total: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[rows] whether the candidates (largest first) hold every token that the row's filters can keep.

    Args:
        values: [rows, candidates] scaled logits.
        log_total: [rows, 1] log of the sum of exp over the whole vocabulary.
    """
    count = values.shape[1]
    short_k = (filters.top_k > 0) & (filters.top_k < count)
    # A nucleus that is taken of a smaller set (top-k before it) lies inside that set.
    inside = ((values - log_total).exp().sum(-1, keepdim=True) > filters.top_p) & (filters.top_k == 0)
    floor = (filters.min_p > 0) & (values[:, -1:] < values[:, :1] + filters.min_p.log())
    floor &= (filters.top_k == 0) | (filters.top_p >= 1)  # else the nucleus depends on tokens that are no candidates
    tied = values[:, -1:] == values.gather(1, (filters.top_k.long() - 1).clamp(0, count - 1))
    return ((short_k & ~tied) | ((inside | floor) & (filters.typical_p >= 1)))[:, 0]


def kept(values: torch.Tensor, log_total: torch.Tensor, filters: Filters, passes: Passes) -> torch.Tensor:
    """[rows, tokens] which tokens of the given scaled logits (-inf = not there) pass all filters of their row.

    Args:
        values: [rows, tokens] the whole vocabulary, or candidates that `decided_by_candidates`.
        log_total: [rows, 1] log of the sum of exp over the whole vocabulary.
    """
    alive = values > -torch.inf
    if bool((filters.top_k > 0).any()):
        alive &= values >= _kth(values, filters.top_k)
    if bool((filters.top_p < 1).any()):
        p = torch.where(alive, (values - log_total).exp(), 0)
        mass = torch.where(filters.top_k > 0, p.sum(-1, keepdim=True), 1.0)
        alive &= (values >= passes.threshold(values, p, (filters.top_p * mass)[:, 0])[:, None]) | (filters.top_p >= 1)
    if bool((filters.min_p > 0).any()):
        alive &= values >= values.amax(-1, keepdim=True) + filters.min_p.log()
    if bool((filters.typical_p < 1).any()):
        p = torch.where(alive, values, -torch.inf).softmax(-1)
        surprise = -p.clamp_min(1e-45).log()
        closeness = -(surprise - (p * surprise).sum(-1, keepdim=True)).abs()
        closeness = torch.where(alive, closeness, -torch.inf)
        alive &= (closeness >= passes.threshold(closeness, p, filters.typical_p[:, 0])[:, None]) | (filters.typical_p >= 1)
    return alive


def _kth(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[rows, 1] the top_k-th largest value of each row; -inf where top_k is off or not below the row's length."""
    width = values.shape[1]
    longest = int(torch.where(top_k < width, top_k, 0).max())
    if not longest:
        return torch.full_like(top_k, -torch.inf, dtype=values.dtype)
    ranked = values.topk(longest, dim=-1).values
    at = ranked.gather(1, (top_k.long() - 1).clamp(0, longest - 1))
    return torch.where((top_k > 0) & (top_k < width), at, -torch.inf)
