"""The nouns of the router: the one form of a request behind all APIs, and the tokens that come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace._common.grammars import Grammar
from headrace_router.tenants import ANONYMOUS, Tenant

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. None = off; without `do_sample` the most likely token is taken.

    `seed` is set whenever `do_sample` is: a request that resumes elsewhere must go on with the same random numbers.
    """

    do_sample: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    watermark: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated request. The engine needs nothing else, and asks nothing of the API it came from.

    Whatever API it came through, the same request has the same values here; see `canonical`.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    keep_stop: bool = True  # the stop text stays in the output (TGI), or is cut (OpenAI)
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0  # no end token, stop token or stop string before
    ignore_eos: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    prompt_top_n_tokens: int = 0  # beside each token of the prompt, with prompt_logprobs
    grammar: Grammar | None = None
    shown_tokens: tuple[int, ...] = ()  # special tokens whose text is part of the output
    tenant: Tenant = ANONYMOUS
    workload: str = "chat"  # one of tenants.CLASSES
    min_tier: str = "trusted"  # least trusted worker of a network that may run it: owner, trusted or open
    deadline: float | None = None  # of time.perf_counter(): too late for anything
    generated: tuple[int, ...] = ()  # output that it has already, from elsewhere; counted, not sent again


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens of a step."""

    id: int
    logprob: float


@dataclass(slots=True)
class PromptToken:
    """A prompt token; `logprob` is None for the first, which nothing predicts. `top`: if asked for."""

    id: int
    logprob: float | None
    top: list[TopToken] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """What is known when a request is done. Times are in seconds."""

    finish_reason: FinishReason
    text: str  # all text of the output
    generated_tokens: int
    input_length: int
    seed: int | None  # None: nothing was drawn
    cached_tokens: int
    queue_seconds: float  # from submit to admission
    inference_seconds: float  # from admission to this token
    stop_string: str | None = None  # that ended it
    draft_tokens: int = 0  # guessed ones that were computed along, since the last admission
    accepted_tokens: int = 0  # of these, the ones that were right


@dataclass(slots=True)
class Token:
    """One output token. `text` is what became whole with it, stop strings taken into account; "" for special tokens."""

    id: int
    logprob: float
    text: str
    special: bool
    top: list[TopToken] | None = None
    prompt: list[PromptToken] | None = None  # with the first token, if asked for
    end: End | None = None  # on the last token
