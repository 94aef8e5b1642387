"""What a step costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """A linear model of a step, and how much KV there is.

    Attributes:
        base: seconds of a step whatever is in it (the weights are read once, and the host's own work).
        row: for each decode row; `prompt`: for each prompt token; `context`: for each token that a decode row attends to.
        kv_tokens: tokens that the KV cache holds.
    """

    base: float
    row: float
    prompt: float
    context: float
    kv_tokens: int

    def seconds(self, rows: int, prompt_tokens: int, context: int) -> float:
        """One step with so many decode rows, prompt tokens, and tokens that the decode rows attend to."""
        return self.base + self.row * rows + self.prompt * prompt_tokens + self.context * context


def roofline(
    parameters: float, kv_bytes: int, *, bandwidth: float, flops: float, memory: float, host: float = 0.3e-3
) -> Machine:
    """A machine that reads bfloat16 weights and KV at `bandwidth` (bytes/s) and multiplies at `flops`; `memory` in bytes.

    Reading and multiplying are added up, although they overlap in part: the model is on the slow side.
    """
    weights, product = 2 * parameters, 2 * parameters / flops
    return Machine(weights / bandwidth + host, product, product, kv_bytes / bandwidth, int((memory - weights) / kv_bytes))


H200 = {"bandwidth": 4.4e12, "flops": 790e12, "memory": 120 * GB}  # what is usable of 4.8 TB/s and 141 GB
MACHINES = {
    # the default model on 2 cores that others used as well: the quicker steps of 1 and 8 streams, and of prompts of 32 and 1000
    "cpu": Machine(base=1.2e-3, row=2.2e-3, prompt=2.3e-3, context=6.5e-6, kv_tokens=254_000),
    "h200-1b": roofline(1.24e9, 32 * 1024, **H200),  # Llama-3.2-1B
    "h200-8b": roofline(8.03e9, 128 * 1024, **H200),  # Llama-3.1-8B
}
