"""Settings dataclasses as command lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._common import options
from headrace._common.options import collect, environment, flag_name, option, parameters, to_flags
from headrace_router.settings import RouterSettings
from headrace_shard.settings import ShardSettings


@dataclass(frozen=True)
class Settings:
    model_id: str = option("", "a text")
    port: int = option(3000, "a number", flags=("-p",), minimum=1)
    limit: int | None = option(None, "a number that may be missing", minimum=1, env="HEADRACE_LIMIT")
    seconds: float = option(1.5, "seconds", minimum=0)
    level: str = option("info", "one of a few", choices=("debug", "info"))
    json_output: bool = option(False, "a switch")
    color: bool = option(True, "a switch that is on")
    names: tuple[str, ...] = option((), "several", env="HEADRACE_NAMES")
    inner: str = option("", "no variable", env=None)


def parse(argv: list[str], env: dict[str, str] | None = None, cls: type[Any] = Settings) -> Any:
    """What a process with these flags and this environment would run with.

    Raises:
        click.UsageError: the line is wrong.
    """
    made: list[Any] = []
    command = click.Command("x", callback=lambda **given: made.append(collect(cls, given, env or {})), params=parameters(cls))
    command.main(argv, standalone_mode=False)
    return made[0]


def refusal(argv: list[str], env: dict[str, str] | None = None) -> str:
    with pytest.raises(click.UsageError) as caught:
        parse(argv, env)
    return caught.value.format_message()


def test_defaults() -> None:
    assert parse([]) == Settings()


def test_a_flag_comes_before_the_environment_and_that_before_the_default() -> None:
    env = {"PORT": "81", "SECONDS": "2", "LEVEL": "debug", "JSON_OUTPUT": "true", "COLOR": "0"}
    assert parse([], env) == Settings(port=81, seconds=2.0, level="debug", json_output=True, color=False)
    flags = ["--port", "82", "--seconds", "3", "--level", "info", "--no-json-output", "--color"]
    assert parse(flags, env) == Settings(port=82, seconds=3.0, level="info", json_output=False, color=True)


def test_short_names_repeated_flags_and_lists_in_variables() -> None:
    assert parse(["-p", "5", "--names", "a", "--names", "b"]) == Settings(port=5, names=("a", "b"))
    assert parse([], {"HEADRACE_NAMES": "a, b"}) == Settings(names=("a", "b"))
    assert parse(["--names", "c"], {"HEADRACE_NAMES": "a,b"}) == Settings(names=("c",))


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert parse([], {"PORT": "", "MODEL_ID": "", "HEADRACE_LIMIT": "", "HEADRACE_NAMES": ""}) == Settings()


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "On"])
def test_true(text: str) -> None:
    assert parse([], {"JSON_OUTPUT": text}).json_output


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_false(text: str) -> None:
    assert not parse([], {"COLOR": text}).color


@pytest.mark.parametrize(
    "env", [{"PORT": "eighty"}, {"PORT": "0"}, {"LEVEL": "loud"}, {"JSON_OUTPUT": "maybe"}, {"SECONDS": "nan"}]
)
def test_a_foreign_variable_that_makes_no_sense_is_a_warning(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([], env) == Settings()
    ((name, text),) = env.items()
    err = capsys.readouterr().err
    assert err.startswith(f"warning: environment variable {name}={text!r} is not usable for --")
    assert err.count("\n") == 1


def test_one_of_ours_that_makes_no_sense_is_an_error() -> None:
    text = refusal([], {"HEADRACE_LIMIT": "many"})
    assert text.startswith("environment variable HEADRACE_LIMIT='many' is not usable for --limit")
    assert "less than 1" in refusal([], {"HEADRACE_LIMIT": "0"})


@pytest.mark.parametrize(
    "argv",
    [["--port", "x"], ["--port", "0"], ["--seconds", "-1"], ["--seconds", "nan"], ["--level", "loud"], ["--nothing"],
     ["--limit"]],
)
def test_wrong_flags(argv: list[str]) -> None:
    assert argv[0] in refusal(argv)


def test_a_field_without_a_variable_reads_none() -> None:
    assert parse([], {"INNER": "x"}) == Settings()
    assert "inner" not in environment(Settings, {"INNER": "x", "": "y"}, lambda text: None)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(
    st.builds(
        Settings, model_id=texts, port=st.integers(1, 2**40), limit=st.none() | st.integers(1),
        level=st.sampled_from(["debug", "info"]), seconds=st.floats(0, allow_nan=False, allow_infinity=False),
        json_output=st.booleans(), color=st.booleans(), names=st.lists(texts, max_size=3).map(tuple), inner=texts,
    )
)
def test_flags_give_the_same_settings(settings: Settings) -> None:
    assert parse(to_flags(settings)) == settings


@pytest.mark.parametrize("cls", [RouterSettings, ShardSettings])
def test_the_children_read_what_the_launcher_writes(cls: type[Any]) -> None:
    settings = cls(**{"model_folder": "/m", "log_level": "debug"})
    assert parse(to_flags(settings), cls=cls) == settings


@pytest.mark.parametrize("cls", [Settings, RouterSettings, ShardSettings])
def test_help_names_flag_default_and_variable(cls: type[Any]) -> None:
    shown = click.Command("x", params=parameters(cls)).get_help(click.Context(click.Command("x"), terminal_width=200))
    for field, row, _, _ in options.fields_of(cls):
        assert flag_name(field) in shown
        assert row.help
        if name := options.env_name(field):
            assert f"env {name}" in " ".join(shown.split())


def test_run_makes_usage_errors_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = click.Command("x", callback=lambda **given: 7, params=parameters(Settings))
    assert options.run(command, ["--port", "1"]) == 7
    assert options.run(command, ["--port", "none"]) == 2
    assert options.run(command, ["--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_infinity_is_a_time() -> None:
    assert math.isinf(parse(["--seconds", "inf"]).seconds)
