"""A request as the frame that a worker gets, and back."""

from __future__ import annotations

from headrace._common.grammars import Grammar
from headrace_router.network.frames import JobFrame, Params, Want
from headrace_router.network.jobs import Lease
from headrace_router.types import GenerateRequest, Sampling


def to_frame(lease: Lease, model: str, text: str | None = None) -> JobFrame:
    """What a worker sees of a job: token ids, or the prompt's `text` in their place, and how to go on. No tenant."""
    request, sampling, done = lease.job.request, lease.job.request.sampling, lease.generated
    params = Params(
        max_new_tokens=request.max_new_tokens - len(done), do_sample=sampling.do_sample, temperature=sampling.temperature,
        top_k=sampling.top_k, top_p=sampling.top_p, typical_p=sampling.typical_p, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty, frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty, logit_bias=list(sampling.logit_bias.items()),
        watermark=sampling.watermark, min_new_tokens=request.min_new_tokens, ignore_eos=request.ignore_eos,
        stop_ids=list(request.stop_token_ids),
        grammar=(request.grammar.kind, request.grammar.source) if request.grammar is not None else None,
    )
    want = Want(request.top_n_tokens, request.prompt_logprobs and not done, request.prompt_top_n_tokens)
    return JobFrame(
        job=lease.job.id, attempt=lease.attempt, model=model, input_ids=[*request.prompt, *done] if text is None else [],
        prefix_len=len(request.prompt), params=params, seed=sampling.seed, rng_offset=len(done), want=want,
        workload=request.workload, text=text, trace=lease.job.origin.traceparent if lease.job.origin is not None else None,
    )


def to_request(frame: JobFrame) -> GenerateRequest:
    """The request that a worker's engine runs."""
    params = frame.params
    sampling = Sampling(
        do_sample=params.do_sample, seed=frame.seed, temperature=params.temperature, top_k=params.top_k,
        top_p=params.top_p, typical_p=params.typical_p, min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty, logit_bias=dict(params.logit_bias), watermark=params.watermark,
    )
    prompt = len(frame.input_ids) - frame.rng_offset
    return GenerateRequest(
        prompt=frame.input_ids[:prompt], generated=tuple(frame.input_ids[prompt:]),
        max_new_tokens=params.max_new_tokens + frame.rng_offset, sampling=sampling,
        stop_token_ids=tuple(params.stop_ids), min_new_tokens=params.min_new_tokens, ignore_eos=params.ignore_eos,
        top_n_tokens=frame.want.top_n, prompt_logprobs=frame.want.prompt_logprobs,
        prompt_top_n_tokens=frame.want.prompt_top_n,
        grammar=Grammar(*params.grammar) if params.grammar is not None else None,  # type: ignore[arg-type]
        workload=frame.workload,
    )
