"""Client libraries of others, unchanged, against the real service: `make test` runs the quick ones, `make judges` all.

`make judges` writes what they said into docs/compatibility.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.judges.environments import NotAvailable
from tests.judges.langchain.scripts import SCRIPTS
from tests.judges.verdicts import Verdict, run_node, run_python, said_by_python, write_table
from tests.parrot import write_parrot
from tests.processes import Service

MODEL = "SmolLM2-135M-Instruct"
ALL = os.environ.get("HEADRACE_WRITE_VERDICTS") == "1"  # make judges


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, list[Verdict]]]:
    """Every judge's verdicts of this run."""
    verdicts: dict[str, list[Verdict]] = {}
    yield verdicts
    if ALL:
        write_table(verdicts)


@pytest.fixture(scope="module")
def served(service: Callable[..., Service]) -> Service:
    return service("--enable-prefill-logprobs", "--max-best-of", "4")


def judge(told: dict[str, list[Verdict]], name: str, run: Callable[[], list[Verdict]]) -> None:
    """Fail with everything that a judge holds against the service. Where its packages cannot be had (no network, no npm) it is
    reported by name as not run, but `make judges` needs them.
    """
    try:
        told[name] = run()
    except NotAvailable as reason:
        if ALL and name != "openai_node":  # which needs npm
            raise
        pytest.skip(f"{name} cannot be had here: {reason}")
    assert [f"{v.check}: {v.why}" for v in told[name] if not v.ok] == []


@pytest.mark.parametrize("name", ["text_generation", "huggingface_hub", "openai", "anthropic"])
def test_quick_judges(name: str, served: Service, told: dict[str, list[Verdict]]) -> None:
    judge(told, name, lambda: run_python(name, served.url, MODEL))


@pytest.mark.judges
def test_openai_node(served: Service, told: dict[str, list[Verdict]]) -> None:
    judge(told, "openai_node", lambda: run_node("openai_node", served.url, MODEL))


@pytest.mark.judges
def test_langchain(
    served: Service, service: Callable[..., Service], tmp_path: Path, told: dict[str, list[Verdict]]
) -> None:
    scripted = service("--model-id", str(write_parrot(tmp_path / "scripted", SCRIPTS)), "--dtype", "float32")
    judge(told, "langchain", lambda: run_python("langchain", served.url, MODEL, scripted.url, "scripted"))


@pytest.mark.judges
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral, newer", "pythonic", "qwen3_coder"])
def test_bfcl(form: str, tmp_path: Path, told: dict[str, list[Verdict]]) -> None:
    def run() -> list[Verdict]:
        folder = write_parrot(tmp_path / "scripted", said_by_python("bfcl", "scripts", "scripted", form))
        parser = form.split(",")[0]
        server = Service("--model-id", str(folder), "--dtype", "float32", "--tool-call-parser", parser).wait_ready()
        try:
            return told.get("bfcl", []) + run_python("bfcl", server.url, "scripted", form)
        finally:
            server.stop()

    judge(told, "bfcl", run)


@pytest.mark.judges
def test_schemathesis(service: Callable[..., Service], tiny_model: Path, told: dict[str, list[Verdict]]) -> None:
    server = service("--model-id", str(tiny_model), "--max-total-tokens", "256")
    judge(told, "schemathesis", lambda: run_python("schemathesis", server.url))


@pytest.mark.judges
def test_lm_eval(service: Callable[..., Service], tiny_model: Path, told: dict[str, list[Verdict]]) -> None:
    server = service("--model-id", str(tiny_model), "--dtype", "float32")
    judge(told, "lm_eval", lambda: run_python("lm_eval", server.url, tiny_model.name, str(tiny_model), torch=True))
