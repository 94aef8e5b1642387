"""The choice of one token for each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace_shard.sampling import filters as flt
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.penalties import Ids, process
from headrace_shard.sampling.random import uniform


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler must know of a request. `index`: number of its next output token, the random counter."""

    params: SamplingParams
    prompt: Ids
    output: Ids
    index: int
    forbidden: Sequence[int]
    top_n: int
    allowed: npt.NDArray[np.bool_] | None = None  # [vocab] what a grammar lets follow


@dataclass(frozen=True, slots=True)
class Choice:
    """Results by row. `failed`: the logits are not numbers; the row's other values mean nothing.

    Log probabilities are of the model's raw distribution, before grammars, penalties, temperature and filters.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    failed: npt.NDArray[np.bool_]
    top: dict[int, tuple[list[int], list[float]]]


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> Choice:
    """One token for each row of logits [rows, vocab], float32."""
    log_total = logits.logsumexp(-1)
    failed = ~log_total.isfinite()
    if bool(failed.any()):
        logits = torch.where(failed[:, None], 0.0, logits)
    scores = _masked(logits, rows)
    changed = [i for i, row in enumerate(rows) if row.params.processes or row.forbidden]
    if changed:
        scores = logits.clone() if scores is logits else scores
        for i in changed:
            process(scores[i], rows[i].params, rows[i].prompt, rows[i].output, rows[i].forbidden)
    tokens = scores.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.sampled]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        picked = scores if len(drawn) == len(rows) else scores[at]
        tokens[at] = _draw(picked, [rows[i] for i in drawn])
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - log_total
    return Choice(tokens.cpu().numpy(), logprobs.cpu().numpy(), failed.cpu().numpy(), _top(logits, log_total, rows))


def _masked(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits [rows, vocab] with -inf where a row's grammar lets nothing follow; the same tensor if no row has one."""
    masks = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    if not masks:
        return logits
    allowed = torch.from_numpy(np.stack([mask for _, mask in masks])).to(logits.device)
    if len(masks) == len(rows):
        return torch.where(allowed, logits, -torch.inf)
    scores = logits.clone()
    for (i, _), mask in zip(masks, allowed, strict=True):
        scores[i].masked_fill_(~mask, -torch.inf)
    return scores


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """One token for each row of processed logits [rows, vocab] by inversion: the first token, in the order of ids,
    at which the cumulative probability passes the row's random number."""
    params = [row.params for row in rows]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    scaled = scores / column([p.temperature for p in params])
    what = flt.Filters(
        column([p.top_k if p.top_k < scores.shape[1] else 0 for p in params]), column([p.top_p for p in params]),
        column([p.typical_p for p in params]), column([p.min_p for p in params]),
    )
    draws = uniform(
        np.array([p.seed for p in params], dtype=np.uint64), np.array([row.index for row in rows], dtype=np.int64)
    )
    u = torch.from_numpy(draws).to(scores.device)[:, None]
    log_total = torch.zeros(len(rows), 1, device=scores.device)  # of the rows that have a filter
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    whole = what.off.clone()  # rows that are decided on the whole vocabulary
    filtered = (~whole).nonzero()[:, 0]
    if len(filtered):
        few = what.take(filtered)
        log_total[filtered] = scaled[filtered].logsumexp(-1, keepdim=True)
        values, ids = flt.best(scaled[filtered])
        decided = flt.decided_by_candidates(values, log_total[filtered], few)
        ids, order = ids.sort(-1)
        keep = flt.kept(values.gather(1, order), log_total[filtered], few)
        tokens[filtered] = ids.gather(1, _invert(values.gather(1, order), keep, u[filtered]))[:, 0]
        whole[filtered[~decided]] = True
    rest = whole.nonzero()[:, 0]
    if len(rest):
        keep = flt.kept(scaled[rest], log_total[rest], what.take(rest))
        tokens[rest] = _invert(scaled[rest], keep, u[rest])[:, 0]
    return tokens


_CHUNK = 64
_LEAST = -80.0  # exp of less is no normal float32


def _invert(values: torch.Tensor, keep: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
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


def _top(logits: torch.Tensor, log_total: torch.Tensor, rows: Sequence[Row]) -> dict[int, tuple[list[int], list[float]]]:
    asked = [i for i, row in enumerate(rows) if row.top_n]
    if not asked:
        return {}
    most = max(rows[i].top_n for i in asked)
    at = torch.tensor(asked, device=logits.device)
    found = most_likely(logits[at], log_total[at], most)
    return {
        i: (ids[: rows[i].top_n], logprobs[: rows[i].top_n]) for i, (ids, logprobs) in zip(asked, found, strict=True)
    }


def most_likely(logits: torch.Tensor, log_total: torch.Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """For each row of logits [rows, vocab]: the `count` most likely tokens and their log probabilities."""
    values, ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    return list(zip(ids.tolist(), (values - log_total[:, None]).tolist(), strict=True))
