"""The embedded model in the form that each peer reads, made once and kept in the cache beside the environments.

Everything comes from the one GGUF file, so that the weights of all are equal up to their quantization.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench.peers import environments
from bench.peers.environments import Unavailable, own_environment, peers_cache, run_bounded, say
from bench.processes import embedded_model
from headrace_launcher.private import locked, new_folder

CONVERT_SECONDS = 900.0


class Models:
    """Model folders by form. Each is made at its first use."""

    def __init__(self) -> None:
        self.source = embedded_model()
        self.gguf = self.source / "model.gguf"

    def safetensors(self) -> Path:
        """A folder as `transformers` reads it, in float32."""
        command = (sys.executable, "-m", "bench.peers.export", str(self.source))
        ours = dict(os.environ)
        return self._make("safetensors", lambda target: run_bounded((*command, str(target)), CONVERT_SECONDS, ours))

    def quantized_gguf(self, kind: str, tools: Path) -> Path:
        """A GGUF file of another type, F32, Q4_0 or Q8_0, made by llama.cpp's own program in `tools`.

        Raises:
            Unavailable: the program fails.
        """
        quantize = (str(tools / "llama-quantize"), "--allow-requantize")

        def make(target: Path) -> None:
            source = self.gguf if kind == "F32" else self.quantized_gguf("F32", tools)
            run_bounded((*quantize, str(source), str(target / "model.gguf"), kind), CONVERT_SECONDS)

        return self._make(f"gguf-{kind.lower()}", make) / "model.gguf"

    def openvino(self, weights: str) -> Path:
        """OpenVINO's form; weights: fp32 or int8.

        Raises:
            Unavailable: the exporter cannot be installed, or fails.
        """
        def make(target: Path) -> None:
            command = (
                str(environments.ensure("convert").folder / "bin/optimum-cli"), "export", "openvino",
                "-m", str(self.safetensors()), "--task", "text-generation-with-past", "--weight-format", weights, str(target),
            )
            run_bounded(command, CONVERT_SECONDS, own_environment({"HF_HUB_OFFLINE": "1"}))

        return self._make(f"openvino-{weights}", make)

    def ctranslate2(self) -> Path:
        """CTranslate2's form, in float32.

        Raises:
            Unavailable: the converter cannot be installed, or fails.
        """
        def make(target: Path) -> None:
            command = (
                str(environments.ensure("convert").folder / "bin/ct2-transformers-converter"),
                "--model", str(self.safetensors()), "--output_dir", str(target), "--force",
            )
            run_bounded(command, CONVERT_SECONDS, own_environment({"HF_HUB_OFFLINE": "1"}))

        return self._make("ctranslate2", make)

    def _make(self, form: str, make: Callable[[Path], None]) -> Path:
        target = peers_cache() / f"{self.source.name}-{form}"
        with locked(target.with_name(f".{target.name}.lock"), say):
            if not target.exists():
                say(f"making {target}")
                with new_folder(target) as scratch:
                    make(scratch)
        if not target.exists():
            raise Unavailable(f"{target} was not made")
        return target
