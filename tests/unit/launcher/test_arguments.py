"""Flags and environment of `headrace serve`: what is taken, what is refused, what the children get."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import click
import pytest

from headrace._common import options
from headrace_launcher import arguments, tgi_flags
from headrace_launcher.arguments import Plan
from headrace_launcher.settings import LauncherSettings
from headrace_router.settings import LendingSettings, RouterSettings
from headrace_shard.settings import ShardSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (LauncherSettings, LendingSettings, RouterSettings, ShardSettings):
        for field in dataclasses.fields(cls):
            if name := options.env_name(field):
                monkeypatch.delenv(name, raising=False)


def plan(*argv: str, with_router: bool = True) -> Plan:
    made: list[Plan] = []

    def callback(**given: Any) -> None:
        made.append(arguments.plan(given, with_router))

    command = click.Command("serve", callback=callback, params=arguments.parameters(with_router))
    command.main(list(argv), standalone_mode=False)
    return made[0]


def refusal(*argv: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        plan(*argv)
    return caught.value.format_message()


def test_shared_settings_reach_every_process() -> None:
    made = plan("--max-total-tokens", "64", "--json-output", "--port", "81", "-g", "3")
    assert made.router is not None
    assert made.router.max_total_tokens == made.shard.max_total_tokens == 64
    assert made.launcher.json_output
    assert made.router.json_output
    assert made.shard.json_output
    assert (made.router.port, made.router.graceful_termination_timeout) == (81, 3.0)


def test_internal_settings_are_no_flags() -> None:
    for name in arguments.INTERNAL:
        assert "No such option" in refusal(f"--{name.replace('_', '-')}", "1")


def test_each_flag_comes_once() -> None:
    params = arguments.parameters(True)
    names = [name for param in params for name in param.opts]
    assert len(names) == len(set(names))
    shown = [param for param in params if not getattr(param, "hidden", False)]
    assert len(shown) < 60


def test_a_shard_group_alone_has_no_router_flags() -> None:
    assert plan(with_router=False).router is None
    with pytest.raises(click.ClickException):
        plan("--port", "80", with_router=False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-input-tokens", "100", "--max-total-tokens", "100"], ["--max-input-tokens 100", "--max-total-tokens 100"]),
        (["--max-input-length", "9", "--max-total-tokens", "8"], ["--max-input-tokens 9", "--max-total-tokens 8"]),
        (["--max-input-length", "9", "--max-input-tokens", "8"], ["--max-input-length 9", "--max-input-tokens 8"]),
        (["--max-batch-total-tokens", "64", "--max-total-tokens", "65"], ["64", "65"]),
        (["--num-shard", "0"], ["--num-shard"]),
        (["--num-shard", "2", "--sharded", "false"], ["--num-shard 2", "--sharded"]),
        (["--port", "70000"], ["--port 70000"]),
        (["--api-keys-file", "/nowhere/keys.toml"], ["--api-keys-file /nowhere/keys.toml", "no such file"]),
        (["--shard-tcp", "70000"], ["--shard-tcp 70000"]),
        (["--validation-workers", "0"], ["--validation-workers"]),
        (["--dtype", "float8"], ["--dtype", "float8"]),
        (["--draft-model-id", "x", "--speculate", "0"], ["draft model x", "--speculate 0"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_contradictions_name_what_contradicts(argv: list[str], words: list[str]) -> None:
    message = refusal(*argv)
    assert all(word in message for word in words), message


def test_a_small_step_budget_is_fine() -> None:
    """Prompts are cut into chunks, so that the budget of a step does not bound them."""
    made = plan("--max-input-tokens", "512", "--max-total-tokens", "1024", "--max-step-tokens", "64")
    assert made.shard.max_step_tokens == 64
    assert made.router is not None
    assert made.router.max_step_tokens == 64


def test_tgis_name_of_the_step_budget_promises_whole_prompts() -> None:
    assert plan("--max-input-tokens", "512", "--max-batch-prefill-tokens", "600").shard.max_step_tokens == 600
    message = refusal("--max-input-tokens", "512", "--max-batch-prefill-tokens", "64")
    assert "--max-batch-prefill-tokens 64 is less than --max-input-tokens 512" in message
    assert "two names of one setting" in refusal("--max-step-tokens", "9", "--max-batch-prefill-tokens", "8")


def test_equal_old_and_new_input_limit() -> None:
    assert plan("--max-input-length", "9", "--max-input-tokens", "9").shard.max_input_tokens == 9


def test_a_bad_variable_is_an_error_only_if_it_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_BEST_OF", "many")
    monkeypatch.setenv("PORT", "81")
    made = plan()
    assert made.router is not None
    assert (made.router.max_best_of, made.router.port) == (2, 81)
    assert capsys.readouterr().err.count("MAX_BEST_OF") == 1
    monkeypatch.setenv("HEADRACE_THREADS", "many")
    assert "HEADRACE_THREADS" in refusal()


def test_hostname_of_containers_is_not_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "f3a9c0")
    made = plan()
    assert made.router is not None
    assert made.router.hostname == "127.0.0.1"


@pytest.mark.parametrize("flag", tgi_flags.WITHOUT_MEANING)
def test_flags_without_meaning_are_taken_with_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    takes_value, _ = tgi_flags.WITHOUT_MEANING[flag]
    assert plan(flag, *(["1"] if takes_value else [])) == plan()
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert flag in err[0]


@pytest.mark.parametrize("flag", tgi_flags.NOT_BUILT)
def test_flags_that_are_not_built_are_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in refusal(flag, *(["1"] if tgi_flags.NOT_BUILT[flag] else []))
    name = flag[2:].upper().replace("-", "_")
    monkeypatch.setenv(name, "1")
    plan()
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["awq", "gptq", "eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "exl2", "fp8", "marlin"]
)
def test_quantizations_that_are_not_built_are_refused_beside_those_that_are(value: str) -> None:
    assert refusal("--quantize", value).endswith(f"'{value}' is not one of 'int8', 'q4'.")


def test_quantization_and_data_type_are_one_choice() -> None:
    assert plan("--quantize", "int8").shard.quantize == "int8"
    assert "--dtype bfloat16 and --quantize q4" in refusal("--dtype", "bfloat16", "--quantize", "q4")


def test_hidden_flags_stay_out_of_help() -> None:
    command = click.Command("serve", params=arguments.parameters(True))
    text = command.get_help(click.Context(command))
    for flag in (*tgi_flags.WITHOUT_MEANING, *tgi_flags.NOT_BUILT):
        assert f"{flag} " not in text


def test_children_read_back_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--api-key", "secret", "--max-total-tokens", "99", "--port", "81", "--threads", "1")
    assert made.router is not None
    monkeypatch.setenv("PORT", "9999")
    monkeypatch.setenv("LOG_LEVEL", "error")
    env = arguments.child_environment(made)
    assert "PORT" not in env
    argv = arguments.router_command(made.router)
    assert argv[:3] == [sys.executable, "-m", "headrace_router"]
    assert "secret" not in " ".join(argv)
    assert _parse(RouterSettings, argv[3:], env) == made.router
    argv = arguments.shard_command(dataclasses.replace(made.shard, rank=1))
    assert "--rank 1" in " ".join(argv)
    assert _parse(ShardSettings, argv[3:], env) == dataclasses.replace(made.shard, rank=1)


def _parse(cls: type[options.S], argv: list[str], env: dict[str, str]) -> options.S:
    made: list[options.S] = []

    def callback(**given: Any) -> None:
        made.append(options.collect(cls, given, env))

    command = click.Command("child", params=options.parameters(cls), callback=callback)
    command.main(argv, standalone_mode=False)
    return made[0]


def test_the_launcher_imports_nothing_heavy() -> None:
    code = (
        "import sys, headrace_launcher.cli, headrace_launcher.serve; "
        "heavy = {'torch', 'transformers', 'grpc', 'huggingface_hub', 'gguf', 'numpy', 'tokenizers', 'aiohttp'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_gateway_has_no_shards_and_needs_a_token_file() -> None:
    made = plan("--role", "gateway", "--worker-token-file", "t", "--max-queue-time", "3")
    assert (made.is_gateway, made.shards) == (True, 0)
    assert not plan().is_gateway
    assert "--worker-token-file" in refusal("--role", "gateway")
    assert "--num-shard 2" in refusal("--role", "gateway", "--worker-token-file", "t", "--num-shard", "2")
    assert "--broker ftp... must be" in refusal("--role", "gateway", "--worker-token-file", "t", "--broker", "ftp://x")
    assert "--draft-model-id x" in refusal("--role", "gateway", "--worker-token-file", "t", "--draft-model-id", "x")
    assert "contradict" in refusal("--role", "gateway", "--worker-token-file", "t", "--gateway", "wss://x")


@pytest.mark.parametrize("flags", [("--max-queue-time", "3"), ("--slots", "3"), ("--worker-token-file", "t")])
def test_flags_of_another_role_are_refused(flags: tuple[str, ...]) -> None:
    assert flags[0] in refusal(*flags)


def given(*argv: str) -> dict[str, Any]:
    """The values of a command line of `headrace worker`."""
    made: list[dict[str, Any]] = []

    def callback(**values: Any) -> None:
        made.append(values)

    params = [*options.parameters(LendingSettings), *arguments.parameters(True)]
    click.Command("worker", callback=callback, params=params).main(list(argv), standalone_mode=False)
    return made[0]


def test_a_worker_serves_what_its_gateway_wants_on_a_free_port() -> None:
    made = arguments.worker_plan(given("--gateway", "wss://x", "--pause-above-load", "2.5", "--insecure"))
    assert made.router is not None
    assert made.router.insecure
    assert (made.router.port, made.router.pause_above_load, made.lends_what_is_wanted) == (0, 2.5, True)
    assert arguments.router_command(made.router).count("--pause-above-load") == 1
    named = arguments.worker_plan(given("--gateway", "wss://x", "--model-id", "m", "--port", "81"))
    assert named.router is not None
    assert (named.router.port, named.lends_what_is_wanted) == (81, False)
    for flags, text in ((("--slots", "2"), "--gateway"), (("--gateway", "wss://x", "--upstream-api", "tgi"), "--upstream-api")):
        with pytest.raises(click.UsageError, match=text):
            arguments.worker_plan(given(*flags))


def test_a_worker_that_lends_a_server_has_few_flags() -> None:
    assert arguments.lending(given("--gateway", "wss://x")) is None
    flags = ("--slots", "3", "--model-id", "m", "--insecure")
    lent = arguments.lending(given("--gateway", "wss://x", "--upstream", "http://u", *flags))
    assert lent is not None
    assert lent[0].insecure
    assert (lent[0].slots, lent[0].model_id, lent[1].upstream, lent[1].upstream_api) == (3, "m", "http://u", "auto")
    for wrong, text in ((("--num-shard", "2", "--gateway", "wss://x"), "--num-shard"), ((), "--gateway")):
        with pytest.raises(click.UsageError, match=text):
            arguments.lending(given("--upstream", "http://u", *wrong))
