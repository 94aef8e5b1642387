"""The Berkeley Function-Calling Leaderboard's data and code: its OpenAI handler asks, its checker reads the calls.

What is judged is how calls are read out of a model's words, so the model is one that says the right calls in its format.
`judge.py scripts FORMAT` prints what it has to say; `judge.py URL MODEL FORMAT` asks for it, whole and streamed.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MODEL = sys.argv[2]
# The package's own table of models imports the SDKs of all vendors; the checker looks up one flag in it.
# ruff: noqa: E402
table = types.ModuleType("bfcl_eval.constants.model_config")
table.MODEL_CONFIG_MAPPING = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}
sys.modules[table.__name__] = table

from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
from checks import check, run
from openai.lib.streaming.chat import ChatCompletionStreamState

KINDS = ("simple_python", "multiple", "parallel", "parallel_multiple")
CATEGORIES = (*KINDS, "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
CASES = 25  # of each category, evenly spread
Call = tuple[str, dict[str, Any]]


def right(possible: Any) -> Any:
    """The first of the right values; None: the argument may be left out."""
    value = next((value for value in possible if value != ""), None)
    if isinstance(value, dict):
        return {key: inner for key, options in value.items() if (inner := right(options)) is not None}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [{key: right(options) for key, options in item.items() if right(options) is not None} for item in value]
    return value


def cases(category: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], list[Call]]]:
    """Entries of the data, the right answers, and calls that the checker takes for right."""
    truths = {entry["id"]: entry["ground_truth"] for entry in load_ground_truth_entry(category)}
    entries = load_dataset_entry(category)
    for entry in entries[:: max(len(entries) // CASES, 1)][:CASES]:
        truth = truths[entry["id"]]
        calls = []
        for called in truth:
            ((name, arguments),) = called.items()
            made = {key: value for key, options in arguments.items() if (value := right(options)) is not None}
            calls.append((name.replace(".", "_"), made))
        if ast_checker(entry["function"], [{n: a} for n, a in calls], truth, Language.PYTHON, category, MODEL)["valid"]:
            yield entry, truth, calls


def dumped(call: Call, key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def tagged(call: Call) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call[1].items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call[0]}>\n{inner}</function>\n</tool_call>"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{dumped(call, 'arguments')}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(dumped(call, "parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(dumped(call, 'arguments') for call in calls)}]",
    "mistral, newer": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls),
    "pythonic": lambda calls: "[" + ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls) + "]",
    "qwen3_coder": lambda calls: "\n".join(map(tagged, calls)),
}


def scripts(form: str) -> dict[str, str]:
    """What the model has to say to each question."""
    return {
        entry["question"][0][-1]["content"]: WRITERS[form](calls)
        for category in CATEGORIES for entry, _, calls in cases(category)
    }


def ask(form: str) -> None:
    os.environ.update(OPENAI_BASE_URL=f"{sys.argv[1]}/v1", OPENAI_API_KEY="-")
    handler = OpenAICompletionsHandler(MODEL, 0.0, MODEL, True)
    told = scripts(form)

    def wrong(category: str, entry: dict[str, Any], truth: list[dict[str, Any]], calls: list[Call]) -> list[str]:
        """What the checker holds against the replies to one question."""
        if told[entry["question"][0][-1]["content"]] != WRITERS[form](calls):
            return []  # the same question once more, with another answer
        data = handler._compile_tools(handler._pre_query_processing_FC({}, entry), entry)
        handler.add_first_turn_message_FC(data, entry["question"][0])
        state = ChatCompletionStreamState()
        for chunk in handler.client.chat.completions.create(
            messages=data["message"], model=MODEL, tools=data["tools"], temperature=0.0, stream=True,
            stream_options={"include_usage": True},
        ):
            state.handle_chunk(chunk)
        found = []
        for way, reply in (("whole", handler._query_FC(data)[0]), ("streamed", state.get_final_completion())):
            said = handler._parse_query_response_FC(reply)["model_responses"]
            try:
                decoded = handler.decode_ast(said, Language.PYTHON, False)
                result = ast_checker(entry["function"], decoded, truth, Language.PYTHON, category, MODEL)
            except Exception as error:  # noqa: BLE001 - whatever the handler raises is the verdict
                result = {"valid": False, "error": repr(error)}
            if not result["valid"] or reply.choices[0].finish_reason != "tool_calls":
                found.append(f"{entry['id']}, {way}: {result} {said!r} {reply.choices[0].finish_reason}")
        return found

    for category in CATEGORIES:
        chosen = list(cases(category))

        @check(f"{form}: {category} ({len(chosen)})")
        def judged(category: str = category, chosen: list[Any] = chosen) -> None:
            with ThreadPoolExecutor(8) as threads:
                found = [line for lines in threads.map(lambda case: wrong(category, *case), chosen) for line in lines]
            assert not found, f"{len(found)} wrong: {found[:3]}"

    run()


if sys.argv[1] == "scripts":
    print(json.dumps(scripts(sys.argv[3])))
else:
    ask(sys.argv[3])
