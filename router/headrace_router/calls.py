"""One Prefill or Decode at work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import grpc.aio

from headrace.v1 import generation_pb2 as pb
from headrace_router.entry import Entry


@dataclass(slots=True)
class Call:
    """A server stream of Steps. `confirmed`: its first Step has been read, so the shard has taken it.

    `sent`: when it was made, on the performance counter.
    """

    method: Literal["prefill", "decode"]
    batch_id: int  # the batch it names; 0: a new one
    rpc: grpc.aio.UnaryStreamCall[pb.PrefillRequest | pb.DecodeRequest, pb.Step]
    entries: list[Entry]  # that it admits
    confirmed: bool = False
    sent: float = field(default_factory=time.perf_counter)
