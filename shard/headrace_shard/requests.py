"""The nouns of a shard: a request as admitted, and what a step reports about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace._common.detokenizer import Detokenizer
from headrace_shard.grammar.state import Constraint
from headrace_shard.sampling.params import SamplingParams

UNFINISHED, LENGTH, EOS_TOKEN, STOP_TOKEN, ERROR = range(5)  # Detail.FinishReason
TopTokens = tuple[list[int], list[float]]  # ids and log probabilities, most likely first
RUNNING, FINISHED, YIELDED, MAX_STEPS, CANCELLED = range(5)  # Step.End


@dataclass(frozen=True)
class Request:
    """A request that passed validation.

    Attributes:
        tokens: [n] prompt, then `generated` tokens of its own earlier output.
        max_new: output limit, earlier output included; `min_new` likewise.
    """

    id: int
    tokens: npt.NDArray[np.int32]
    generated: int
    max_new: int
    params: SamplingParams = field(default_factory=SamplingParams)
    min_new: int = 0
    priority: int = 0
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_top_n: int = 0
    detokenizer: Detokenizer | None = None  # where the client wants text
    cache_salt: str = ""
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    constraint: Constraint | None = None


@dataclass(slots=True)
class Detail:
    """More about one request in one step; see the message of this name. `tokens` are what the step made; `top` is parallel
    to them, or empty.
    """

    request_id: int
    finish_reason: int = UNFINISHED
    message: str | None = None
    tokens: list[int] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: tuple[list[int], list[float]] | None = None
    prompt_top: list[TopTokens] = field(default_factory=list)  # of each prompt token, if asked for
    seed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the draft tokens
    detokenizer: Detokenizer | None = None


@dataclass(slots=True)
class Timings:
    """Seconds of the parts of a step, and how many tokens of each kind it took."""

    forward: float = 0.0
    sample: float = 0.0
    total: float = 0.0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of the draft tokens
    draft: float = 0.0  # seconds of guessing, within `total`
    model_draft_tokens: int = 0  # of the draft tokens, those that the draft model guessed
    model_accepted_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """One step of one batch, before it becomes a message. The three columns are parallel."""

    batch_id: int
    step: int
    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    running: int = 0
    blocks: int = 0
    free_blocks: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    end: int = RUNNING

    def add(self, detail: Detail) -> None:
        """Take in what is known of one more token of a request; a request has one Detail in a step."""
        earlier = next((d for d in self.details if d.request_id == detail.request_id), None)
        if earlier is None:
            self.details.append(detail)
            return
        earlier.finish_reason, earlier.message = detail.finish_reason, detail.message
        earlier.generated_tokens = detail.generated_tokens
        earlier.accepted_tokens = detail.accepted_tokens
        earlier.tokens += detail.tokens
        earlier.top += detail.top
