"""OpenVINO GenAI's continuous batching pipeline behind /v1/completions."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.serving.completions import Stream, options, serve

KV_GIB = 1  # 32 sequences of 256 tokens need 0.4
MAX_STEP_TOKENS = 512


class Pipeline:
    """Steps the pipeline as long as it has requests; new ones join between two steps."""

    def __init__(self, model: Path, threads: int, precision: str | None) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.max_num_batched_tokens = MAX_STEP_TOKENS
        scheduler.max_num_seqs = 256
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads} | ({"INFERENCE_PRECISION_HINT": precision} if precision else {})
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._running: dict[Stream, Any] = {}  # the handle of its request
        self._added = 0

    def run(self, waiting: queue.SimpleQueue[Stream]) -> None:
        """Never returns."""
        while True:
            while not self._running or not waiting.empty():
                self._add(waiting.get())
            self._pipeline.step()
            for stream, handle in list(self._running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        stream.put(list(output.generated_ids))
                if handle.get_status().name != "RUNNING":
                    stream.put([])
                    del self._running[stream]

    def _add(self, stream: Stream) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = stream.max_tokens
        config.ignore_eos, config.do_sample = True, False
        prompt = openvino.Tensor(np.array([stream.prompt], dtype=np.int64))
        self._running[stream] = self._pipeline.add_request(self._added, prompt, config)
        self._added += 1


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--precision", help="of the arithmetic; without it the engine takes the CPU's fastest")
    given = parser.parse_args()
    serve(Pipeline(given.model, given.threads, given.precision), given.tokenizer, given.port)
