"""Changes to the logits before the choice: watermark, penalties, bias, forbidden ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.watermark import green_list

Ids = npt.NDArray[np.int32]


def process(logits: torch.Tensor, params: SamplingParams, prompt: Ids, output: Ids, forbidden: Sequence[int]) -> None:
    """Change one row of logits [vocab] in place.

    Args:
        prompt, output: the request's token ids so far.
        forbidden: ids that may not be chosen now (end tokens before the minimum length).
    """
    if params.watermark is not None:
        last = int(output[-1] if len(output) else prompt[-1])
        logits[green_list(last, len(logits), params.watermark.gamma).to(logits.device)] += params.watermark.delta
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate((prompt, output))).astype(np.int64)).to(logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(output):
        ids, counts = np.unique(output, return_counts=True)
        change = params.frequency_penalty * counts + params.presence_penalty
        at = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
        logits[at] -= torch.from_numpy(change.astype(np.float32)).to(logits.device)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if forbidden:
        logits[list(forbidden)] = -torch.inf
