"""The choice of one token for each row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace_shard.sampling import filters as flt
from headrace_shard.sampling.bits import Bits, has
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.passes import Passes, invert
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
    allowed: Bits | None = None  # what a grammar lets follow


@dataclass(frozen=True, slots=True)
class Choice:
    """Results by row. `failed`: the logits are not numbers; the row's other values mean nothing.

    Log probabilities are of the model's raw distribution, before grammars, penalties, temperature and filters.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    failed: npt.NDArray[np.bool_]
    top: dict[int, tuple[list[int], list[float]]]


def choose(logits: torch.Tensor, rows: Sequence[Row], passes: Passes) -> Choice:
    """One token for each row of logits [rows, vocab], float32. What a grammar forbids becomes -inf in `logits`."""
    best, log_total = passes.scan(logits)
    tokens, totals = best.cpu().numpy(), log_total.cpu().numpy()  # few rows of numbers: numpy's calls cost less than torch's
    failed = ~np.isfinite(totals)
    if failed.any():
        logits = torch.where(torch.from_numpy(failed).to(logits.device)[:, None], 0.0, logits)
    top = _top(logits, log_total, rows)
    moved = [i for i, (row, best) in enumerate(zip(rows, tokens.tolist(), strict=True)) if not _stays(row, best)]
    bound = [(i, allowed) for i in moved if (allowed := rows[i].allowed) is not None]
    if bound:
        passes.mask(logits, [i for i, _ in bound], np.stack([allowed for _, allowed in bound]))
    changed: dict[int, torch.Tensor] = {}  # processed rows
    for i in moved:
        row = rows[i]
        if row.params.processes or row.forbidden:
            changed[i] = logits[i].clone()
            process(changed[i], row.params, row.prompt, row.output, row.forbidden)
        if not row.params.sampled:
            tokens[i] = int(changed.get(i, logits[i]).argmax())
    drawn = [i for i, row in enumerate(rows) if row.params.sampled]
    if drawn:
        scores = logits
        if changed or len(drawn) < len(rows):
            scores = torch.stack([changed.get(i, logits[i]) for i in drawn])
        tokens[drawn] = _draw(scores, [rows[i] for i in drawn], passes).cpu().numpy()
    return Choice(tokens, _picked(logits, tokens) - totals, failed, top)


def _picked(logits: torch.Tensor, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[rows] the logit of each row's token."""
    if logits.device.type == "cpu":
        return logits.numpy()[np.arange(len(tokens)), tokens]
    return logits.gather(1, torch.from_numpy(tokens).to(logits.device)[:, None])[:, 0].cpu().numpy()


def _stays(row: Row, best: int) -> bool:
    """Whether the row's choice is that on its raw logits. What may not follow leaves the best of all, unless it is that."""
    if row.params.processes:
        return False
    if row.params.sampled:
        return not row.forbidden and row.allowed is None
    return best not in row.forbidden and (row.allowed is None or has(row.allowed, best))


def _draw(scores: torch.Tensor, rows: Sequence[Row], passes: Passes) -> torch.Tensor:
    """One token for each row of processed logits [rows, vocab] by inversion: the first token, in the order of ids,
    at which the cumulative probability passes the row's random number."""
    params = [row.params for row in rows]
    draws = uniform(
        np.array([p.seed for p in params], dtype=np.uint64), np.array([row.index for row in rows], dtype=np.int64)
    )
    u = torch.from_numpy(draws).to(scores.device)
    temperatures = torch.tensor([p.temperature for p in params], device=scores.device)
    plain = [i for i, p in enumerate(params) if not p.filters]
    if len(plain) == len(rows):
        return passes.draw(scores, temperatures, u)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    if plain:
        at = torch.tensor(plain, device=scores.device)
        tokens[at] = passes.draw(scores[at], temperatures[at], u[at])
    filtered = [i for i, p in enumerate(params) if p.filters]
    at = torch.tensor(filtered, device=scores.device)
    tokens[at] = _draw_filtered(scores[at] / temperatures[at, None], [params[i] for i in filtered], u[at, None], passes)
    return tokens


def _draw_filtered(scaled: torch.Tensor, params: Sequence[SamplingParams], u: torch.Tensor, passes: Passes) -> torch.Tensor:
    """[rows] tokens of rows that have a filter: scaled logits [rows, vocab], numbers [rows, 1]."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scaled.device)[:, None]

    what = flt.Filters(
        column([p.top_k if p.top_k < scaled.shape[1] else 0 for p in params]), column([p.top_p for p in params]),
        column([p.typical_p for p in params]), column([p.min_p for p in params]),
    )
    log_total = scaled.logsumexp(-1, keepdim=True)
    values, ids = flt.best(scaled)
    decided = flt.decided_by_candidates(values, log_total, what)
    ids, order = ids.sort(-1)
    values = values.gather(1, order)
    tokens = ids.gather(1, invert(values, flt.kept(values, log_total, what, passes), u))[:, 0]
    rest = (~decided).nonzero()[:, 0]  # decided on the whole vocabulary
    if len(rest):
        keep = flt.kept(scaled[rest], log_total[rest], what.take(rest), passes)
        tokens[rest] = invert(scaled[rest], keep, u[rest])[:, 0]
    return tokens


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
