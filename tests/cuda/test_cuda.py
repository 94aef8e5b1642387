"""On a GPU as on the CPU: logits, choices, and everything a served request can ask for (make test-cuda)."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_shard.backends.torch_backend import TorchBackend
from headrace_shard.parallel.group import Alone
from headrace_shard.sampling.bits import add, none_of
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.passes import TorchPasses
from headrace_shard.sampling.sampler import Row, choose
from tests.models import write_tiny_model
from tests.processes import Service
from tests.unit.shard.test_models import FAMILIES, logits_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NONE = np.zeros(0, dtype=np.int32)
EXACT = ("--dtype", "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **{**FAMILIES[family], "attention_bias": False, "mlp_bias": False})
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, 290, (n,), generator=generator).tolist() for n in (1, 2, 17, 40, 23)]
    on_cpu = logits_of(folder, sequences, 9, TorchBackend(torch.float32, CPU, Alone()))
    on_gpu = logits_of(folder, sequences, 9, TorchBackend(torch.float32, GPU, Alone()))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        assert other.device == GPU
        assert torch.allclose(one, other.cpu(), atol=2e-4, rtol=1e-4)


def test_choices_equal_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(4)
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.7, "seed": 1}, {"temperature": 1.3, "top_k": 40, "seed": 2},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3}, {"temperature": 1.0, "typical_p": 0.8, "seed": 4},
        {"temperature": 1.0, "min_p": 0.01, "seed": 5}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0},
    ]
    seen = np.arange(50, dtype=np.int32)
    allowed = none_of(49152 // 32)
    for token in range(0, 49152, 7):
        add(allowed, token)
    for index in range(20):
        logits = torch.randn(len(settings) + 1, 49152, generator=generator) * 4
        rows = [Row(SamplingParams(**p), seen, seen[:9], index, (3,), 5) for p in settings]
        rows.append(Row(SamplingParams(), NONE, NONE, index, (), 0, allowed))
        other, one = choose(logits.to(GPU), rows, TorchPasses()), choose(logits, rows, TorchPasses())
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert {i: ids for i, (ids, _) in one.top.items()} == {i: ids for i, (ids, _) in other.top.items()}


GROUP_OF_ONE = """
import os, sys, torch
from headrace_shard.parallel.distributed import DistributedGroup

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
group = DistributedGroup(0, 1, sys.argv[1], device)
assert group.limit(2.0) == 2.0
assert group.sum(torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)).tolist() == [[2.0] * 3] * 2
assert group.gather(torch.ones(2, 1, device=device)).device == device
assert group.broadcast(torch.tensor([5])).tolist() == [5]
os._exit(0)  # as a shard ends
"""


def test_a_group_sums_on_the_gpu_and_speaks_on_the_host(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", GROUP_OF_ONE, str(tmp_path / "meet")], check=True, timeout=60)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """services(device, *flags): a service of the tiny model there."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    running: dict[tuple[str, ...], Service] = {}

    def get(device: str, *flags: str) -> Service:
        key = (device, *flags)
        if key not in running:
            env = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else None
            running[key] = Service("--model-id", str(folder), *flags, env=env)
        return running[key].wait_ready()

    yield get
    for service in running.values():
        service.stop()


def ask(service: Service, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{service.url}/v1/completions", json.dumps({"prompt": "Hello", "max_tokens": 40, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "biased": {"temperature": 0, "logit_bias": {"70": 5}},
    "many": {"temperature": 1.0, "seed": 3, "n": 3},
    "long": {"temperature": 0, "prompt": "again and again " * 15},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_service_answers_as_on_the_cpu(name: str, services: Callable[..., Service]) -> None:
    wanted = {**REQUESTS[name], "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    one, other = ask(services("cpu", *EXACT), **wanted), ask(services("cuda", *EXACT), **wanted)
    assert [c["token_ids"] for c in one["choices"]] == [c["token_ids"] for c in other["choices"]]
    for a, b in zip(one["choices"], other["choices"], strict=True):
        assert np.allclose(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], atol=1e-3)


@pytest.mark.parametrize("flags", [(), EXACT, ("--speculate", "4"), ("--max-batch-total-tokens", "1024")])
def test_many_at_once_with_every_feature(flags: tuple[str, ...], services: Callable[..., Service]) -> None:
    service = services("cuda", *flags)
    with urllib.request.urlopen(f"{service.url}/info", timeout=10) as reply:
        assert json.loads(reply.read())["model_device_type"] == "cuda"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    shaped = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}
    bodies = [{**list(REQUESTS.values())[i % len(REQUESTS)], "max_tokens": 60, "ignore_eos": True} for i in range(48)]
    with ThreadPoolExecutor(64) as pool:
        constrained = [pool.submit(ask, service, temperature=0, max_tokens=100, **shaped) for _ in range(16)]
        plain = [pool.submit(ask, service, **body) for body in bodies]
        for reply in plain:
            assert {c["finish_reason"] for c in reply.result()["choices"]} == {"length"}
        for reply in constrained:
            (choice,) = reply.result()["choices"]
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["text"])["ok"] in (True, False)
