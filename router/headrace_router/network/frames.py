"""The frames of the worker protocol, version 1: one struct each, as msgpack or JSON. See docs/network.md for the rules.

A frame is an object whose member `t` names its kind. Unknown members and unknown kinds are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct

VERSION: Final = 1
PROTOCOLS: Final = ("headrace.worker.v1+msgpack", "headrace.worker.v1+json")  # as offered: the first is preferred
PATH: Final = "/v1/worker/connect"
HEARTBEAT: Final = 5.0  # seconds between pings on an idle line; half of it for the answer
MAX_FRAME: Final = 1 << 20  # bytes, from a worker
REFUSED: Final = range(4400, 4500)  # close codes that say why

Row = tuple[str, int, int, int, float | None, int, list[tuple[int, float]]]
# (job, attempt, index, token id, log probability, flags (0), most likely tokens)
Begun = tuple[str, int, int, float]  # (job, attempt, prompt tokens that were cached, seconds in the worker's own queue)
TextRow = tuple[str, int, int, str, int | None, float | None, list[tuple[int, float]], str | None]
# (job, attempt, number of the row, text, token id, log probability, most likely tokens, finish as `done` has it, on the last);
# None: the worker does not know it
TEXT: Final = "text"  # the feature of a worker that takes and gives text, and so goes on after nobody's tokens exactly


class Model(Struct):
    """What a worker serves."""

    id: str
    revision: str | None = None
    format: str = ""  # of the weights: a request goes on only in the format that it began in
    tokenizer_hash: str | None = None
    max_input: int = 0
    max_total: int = 0
    features: list[str] = []
    adapters: list[str] = []


class Hello(Struct, tag_field="t", tag="hello"):
    """Worker: the first frame."""

    models: list[Model]
    slots: int
    agent: str = ""
    proto: int = VERSION
    capacity: int | None = None  # jobs that it takes now, as `capacity` tells later; None: all slots


class Accept(Struct, tag_field="t", tag="accept"):
    """Worker: the job is taken."""

    job: str
    attempt: int


class Nack(Struct, tag_field="t", tag="nack"):
    """Worker: the job is not taken; another worker may. `code`: busy, oom, unsupported or draining."""

    job: str
    attempt: int
    code: str = "busy"


class PromptTokens(Struct, tag_field="t", tag="prompt"):
    """Worker: log probabilities of the prompt, before the first step, if the job wants them."""

    job: str
    attempt: int
    tokens: list[tuple[int, float | None, list[tuple[int, float]] | None]]


class Step(Struct, tag_field="t", tag="step", omit_defaults=True):
    """Worker: the tokens of one decode step, of all jobs; `begun`: the facts of those whose first token this is."""

    x: list[Row]
    begun: list[Begun] = []


class TextStep(Struct, tag_field="t", tag="text"):
    """Worker that speaks text: what has come of its jobs; a row with text or an id stands for at least one token."""

    x: list[TextRow]


class Capacity(Struct, tag_field="t", tag="capacity"):
    """Worker: how many jobs it takes from now on, within what was granted; 0: it pauses."""

    slots: int


class Done(Struct, tag_field="t", tag="done"):
    """Worker: a job has ended; `finish` is eos, length, stop or cancelled."""

    job: str
    attempt: int
    finish: str = "eos"


class Fail(Struct, tag_field="t", tag="fail"):
    """Worker: a job has failed; `retriable`: another worker may run it."""

    job: str
    attempt: int
    code: str = "internal"
    retriable: bool = True
    message: str = ""


class Status(Struct, tag_field="t", tag="status"):
    """Worker: what it runs, every heartbeat. `slots_free`, `kv_free_tokens`: what it could take beside that, if it says so."""

    running: list[tuple[str, int, int]]
    slots_free: int | None = None
    kv_free_tokens: int | None = None
    waiting: int = 0
    tok_s: float = 0.0


class Bye(Struct, tag_field="t", tag="bye"):
    """Worker: it leaves; what it has not ended goes elsewhere."""

    reason: str = ""


class Ping(Struct, tag_field="t", tag="ping"):
    """Either: to be answered with a pong of the same number."""

    n: int = 0


class Pong(Struct, tag_field="t", tag="pong"):
    n: int | None = 0


class Welcome(Struct, tag_field="t", tag="welcome"):
    """Gateway: the worker may work."""

    session: str
    gateway: str
    slots: int  # granted: not more than asked for
    heartbeat_s: float = HEARTBEAT
    lease_s: float = 0.0
    max_frame: int = MAX_FRAME
    tier: str = "trusted"  # owner, trusted, open, or probation: it gets probes alone, and is welcomed again after them
    models: list[str] = []  # in demand


class Params(Struct, omit_defaults=True):
    """How the tokens of a job are chosen; what is not there is off."""

    max_new_tokens: int  # that are still to come
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: list[tuple[int, float]] = []
    watermark: bool = False
    min_new_tokens: int = 0  # of the whole output
    ignore_eos: bool = False
    stop_ids: list[int] = []
    grammar: tuple[str, str] | None = None  # (kind, source)


class Want(Struct):
    """What is to be told beside tokens."""

    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_top_n: int = 0


class JobFrame(Struct, tag_field="t", tag="job"):
    """Gateway: run this. The last `rng_offset` of the input ids are output already: the first new token has that index."""

    job: str
    attempt: int
    model: str
    input_ids: list[int]
    prefix_len: int  # of the prompt within the input ids
    params: Params
    seed: int | None
    rng_offset: int
    want: Want
    workload: str = "chat"
    trace: str | None = None  # W3C's traceparent of the request
    text: str | None = None  # of the prompt, in place of its ids, for a worker that speaks text


class Cancel(Struct, tag_field="t", tag="cancel"):
    """Gateway: stop this job."""

    job: str
    attempt: int
    reason: str


class Drain(Struct, tag_field="t", tag="drain"):
    """Gateway: no new jobs will come."""

    reason: str


class Refusal(Struct, tag_field="t", tag="error"):
    """Gateway: why the connection is closed, in full; the close frame has room for a part."""

    code: int
    message: str


FromWorker = Hello | Accept | Nack | PromptTokens | Step | TextStep | Capacity | Done | Fail | Status | Bye | Ping | Pong
FromGateway = Welcome | JobFrame | Cancel | Drain | Refusal | Ping | Pong


class _Kind(Struct):
    t: str


class Malformed(ValueError):
    """A frame that is not one."""


@dataclass(frozen=True)
class Codec:
    """One end of a connection: how its frames are written and read."""

    protocol: str
    reads: Any
    _tags: frozenset[str] = field(init=False)
    _encoder: Any = field(init=False)
    _decoder: Any = field(init=False)
    _kind: Any = field(init=False)

    def __post_init__(self) -> None:
        coding: Any = msgspec.json if self.is_text else msgspec.msgpack
        set_field = object.__setattr__
        set_field(self, "_encoder", coding.Encoder())
        set_field(self, "_decoder", coding.Decoder(self.reads))
        set_field(self, "_kind", coding.Decoder(_Kind))
        set_field(self, "_tags", frozenset(kind.__struct_config__.tag for kind in self.reads.__args__))

    @property
    def is_text(self) -> bool:
        return self.protocol.endswith("+json")

    def encode(self, frame: Struct) -> bytes:
        made: bytes = self._encoder.encode(frame)
        return made

    def decode(self, data: bytes | str) -> Any:
        """The frame, or None if it is of an unknown kind.

        Raises:
            Malformed: it is not a frame.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            try:
                kind = self._kind.decode(data).t
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raise Malformed(str(error)[:200]) from None
            if kind in self._tags:
                raise Malformed(str(error)[:200]) from None
            return None
