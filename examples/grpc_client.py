#!/usr/bin/env python3
"""Ask a shard directly, without the router, and print the answer as it streams.

    python examples/grpc_client.py unix:/path/to/shard-0 "The capital of France is"

The answer is greedy: no sampling field is set. Needs only grpcio, protobuf and headrace's generated code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import grpc

from headrace._common.intermediate import read_step
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_pb2_grpc

REQUEST_ID = 1


def stream(stub: generation_pb2_grpc.GenerationStub, prompt: str, max_new_tokens: int, owner: str) -> Iterator[pb.Step]:
    """Every step of one request: Prefill gives the first token, Decode the others."""
    request = pb.Request(
        id=REQUEST_ID, text=prompt, return_text=True, stopping=pb.Stopping(max_new_tokens=max_new_tokens)
    )
    ended, batch_id = False, 0
    for step in stub.Prefill(pb.PrefillRequest(owner=owner, requests=[request])):
        batch_id = step.batch_id
        ended = ended or any(intermediate.is_end for intermediate in read_step(step))
        yield step
    if not ended:
        yield from stub.Decode(pb.DecodeRequest(owner=owner, batch_ids=[batch_id]))


def main(target: str, prompt: str, max_new_tokens: int = 64) -> int:
    with grpc.insecure_channel(target) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        try:
            for step in stream(stub, prompt, max_new_tokens, owner="grpc_client"):
                print("".join(detail.text for detail in step.details), end="", flush=True)
        except grpc.RpcError as error:
            print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print()
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4])))
