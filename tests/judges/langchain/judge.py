"""LangChain: its standard suite for chat models on ChatOpenAI, and the Hugging Face classes.

`judge.py URL MODEL SCRIPTED_URL SCRIPTED_MODEL`: tests that a small model cannot pass run before one that says scripts.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


SKILLED = "structured_output or json_mode or agent_loop or unicode_tool_call"


class Lines:
    """Prints the outcome of each test as a check. `kind`: of the model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = f"standard suite, {self._kind}: {report.nodeid.split('::')[-1]}"
        if report.when == "call" and report.passed:
            print(json.dumps({"check": name, "ok": True}), flush=True)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            print(json.dumps({"check": name, "skipped": reason.removeprefix("Skipped: ")}), flush=True)
        elif report.failed:
            print(json.dumps({"check": name, "ok": False, "why": str(report.longrepr)[-1500:]}), flush=True)


def suite(kind: str, url: str, model: str, which: str) -> None:
    """Run LangChain's own tests in this process, their output away from ours."""
    os.environ.update(JUDGE_URL=url, JUDGE_MODEL=model)
    here = str(Path(__file__).with_name("suite.py"))
    pytest.main(["-p", "no:terminal", "-p", "no:cacheprovider", "-c", os.devnull, "--confcutdir", str(Path(here).parent),
                 "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session",
                 "-o", "asyncio_default_fixture_loop_scope=session", "-k", which, here], plugins=[Lines(kind)])


def clients() -> None:
    from checks import check, run
    from langchain_openai import ChatOpenAI, OpenAI

    url, model = sys.argv[1], sys.argv[2]
    given = {"base_url": f"{url}/v1", "api_key": "-", "model": model, "temperature": 0, "max_tokens": 6}

    @check("ChatOpenAI: invoke, stream, batch")
    def chat() -> None:
        client = ChatOpenAI(**given)
        whole = client.invoke("Say hello.")
        assert "".join(str(part.content) for part in client.stream("Say hello.")) == whole.content
        assert [m.content for m in client.batch(["Say hello."] * 3)] == [whole.content] * 3

    @check("OpenAI (completions): invoke, stream")
    def completion() -> None:
        client = OpenAI(**given)
        assert "".join(client.stream("1 2 3")) == client.invoke("1 2 3")

    @check("HuggingFaceEndpoint: invoke, stream; ChatHuggingFace")
    def hugging_face() -> None:
        from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

        client = HuggingFaceEndpoint(
            endpoint_url=url, max_new_tokens=6, do_sample=False, temperature=None, top_p=None, typical_p=None,
            huggingfacehub_api_token="-",
        )
        assert "".join(client.stream("1 2 3")) == client.invoke("1 2 3")
        assert ChatHuggingFace(llm=client, model_id=model).invoke("Say hello.").content

    run()


clients()
suite("small model", *sys.argv[1:3], f"not ({SKILLED})")
suite("scripted model", *sys.argv[3:5], SKILLED)
