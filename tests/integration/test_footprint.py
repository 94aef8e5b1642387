"""What a shard process costs beyond its KV cache: the modules that it imports, and its largest memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_shard.kernels import build as building
from tests.models import write_tiny_model
from tests.processes import ShardProcess

HEAVY = {
    "transformers", "scipy", "sympy", "pandas", "sklearn", "huggingface_hub", "PIL", "matplotlib", "aiohttp", "torchvision",
    "torch._dynamo", "torch._inductor", "headrace_router", "headrace_launcher",
}
LOAD = """
import sys
from headrace._common.model_folder import ModelFolder
from headrace_shard import server
from headrace_shard.settings import ShardSettings
server.load(ShardSettings(model_folder=sys.argv[1], threads=1, max_batch_total_tokens=512), ModelFolder.open(sys.argv[1]), "")
print(*sorted(sys.modules))
"""


def test_a_shard_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(write_tiny_model(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "torch" in modules
    assert sorted(HEAVY & set(modules)) == []


@pytest.mark.skipif(building.compiler() is None and not building.library_path().exists(), reason="torch unpacks to float32")
def test_the_largest_memory_of_a_shard_with_the_default_model(embedded_model: Path) -> None:
    """Torch and its libraries take about 240 MB, the packed weights 96, the vocabulary's tables for grammars 30; neither the
    mapped file nor what making those tables takes must come on top. The KV cache, which is not meant, is a small one.
    """
    shard = ShardProcess(embedded_model, "--max-total-tokens", "256", "--max-batch-total-tokens", "256")
    try:
        shard.wait_ready()
        status = Path(f"/proc/{shard.popen.pid}/status").read_text()
        assert re.search(r"weights Q4_1 \+ Q8_0, 96 MB a step; memory reads [\d.]+ GB/s: at most", shard.log())
    finally:
        shard.stop()
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found is not None
    assert int(found[1]) * 1024 < 470e6  # 447e6 here; libraries differ
