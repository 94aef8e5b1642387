"""Settings dataclasses as command lines: every flag is one field, with type, default, help and environment name.

A settings class is a frozen dataclass whose fields are made by `option`. `parse` reads flags and environment into an
instance; `to_flags` writes an instance as the flags that give it, for a child process.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

S = TypeVar("S")

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Option:
    """How one settings field appears on the command line."""

    help: str
    env: str | None = None
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None


def option(
    default: Any, help: str, *, env: str | None = "", flags: tuple[str, ...] = (), choices: tuple[str, ...] = (),
    minimum: float | None = None,
) -> Any:
    """A settings field. `env` "" means the upper-case field name, None no variable; `flags` adds short or old names."""
    return dataclasses.field(default=default, metadata={"option": Option(help, env, flags, choices, minimum)})


def fields_of(cls: type) -> list[tuple[dataclasses.Field[Any], Option, type, bool]]:
    """(field, option, value type, is repeatable) of each settings field of `cls`."""
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        kind, repeatable = hints[field.name], False
        if typing.get_origin(kind) is tuple:
            kind, repeatable = typing.get_args(kind)[0], True
        elif isinstance(kind, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        rows.append((field, field.metadata["option"], kind, repeatable))
    return rows


def env_name(field: dataclasses.Field[Any]) -> str | None:
    env: str | None = field.metadata["option"].env
    return field.name.upper() if env == "" else env


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def from_text(text: str, kind: type, row: Option) -> Any:
    """The value that `text` of an environment variable stands for.

    Raises:
        ValueError: it stands for none.
    """
    if kind is bool:
        if text.lower() not in TRUE | FALSE:
            raise ValueError("not a boolean")
        return text.lower() in TRUE
    value = kind(text)
    if value != value:
        raise ValueError("not a number")
    if row.choices and value not in row.choices:
        raise ValueError(f"not one of {', '.join(row.choices)}")
    if row.minimum is not None and value < row.minimum:
        raise ValueError(f"less than {row.minimum}")
    return value


def environment(cls: type, env: Mapping[str, str], warn: Callable[[str], None]) -> dict[str, Any]:
    """The fields of `cls` that environment variables give.

    A variable that cannot be parsed is an error only if its name is ours; others belong to whoever set them.

    Raises:
        click.UsageError: a HEADRACE_ variable cannot be parsed.
    """
    values: dict[str, Any] = {}
    for field, row, kind, repeatable in fields_of(cls):
        name = env_name(field)
        text = env.get(name) if name else None
        if text is None or (text == "" and kind is not bool):
            continue
        try:
            parts = text.split(",") if repeatable else [text]
            parsed = [from_text(part.strip(), kind, row) for part in parts]
        except ValueError as error:
            message = f"environment variable {name}={text!r} is not usable for {flag_name(field)}: {error}"
            if name and name.startswith("HEADRACE_"):
                raise click.UsageError(message) from None
            warn(message + "; ignored")
            continue
        values[field.name] = tuple(parsed) if repeatable else parsed[0]
    return values


def parameters(cls: type) -> list[click.Parameter]:
    """One click option for each field of `cls`. The default is None: `collect` fills in what was not given."""
    made: list[click.Parameter] = []
    for field, row, kind, repeatable in fields_of(cls):
        names = [flag_name(field) if kind is not bool else f"{flag_name(field)}/--no-{field.name.replace('_', '-')}"]
        names += [*row.flags, field.name]
        shown = [f"default {field.default}"] if field.default not in (None, (), "", False) else []
        shown += [f"env {env_name(field)}"] if env_name(field) else []
        kwargs: dict[str, Any] = {"help": row.help + (f" [{'; '.join(shown)}]" if shown else ""), "default": None}
        if kind is not bool:
            kwargs["type"] = _click_type(kind, row)
            kwargs["multiple"] = repeatable
        made.append(click.Option(names, **kwargs))
    return made


def _click_type(kind: type, row: Option) -> Any:
    if row.choices:
        return click.Choice(row.choices)
    if kind is float:
        return _FloatRange(min=row.minimum)
    return click.IntRange(min=int(row.minimum)) if row.minimum is not None else kind


class _FloatRange(click.FloatRange):
    """`nan` is within every range of click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def collect(cls: type[S], given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> S:
    """Settings from flags (`given`, None or () where a flag is absent), else environment, else default."""
    values = environment(cls, os.environ if env is None else env, lambda text: print(f"warning: {text}", file=sys.stderr))
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values.update({k: v for k, v in given.items() if k in names and v is not None and v != ()})
    return cls(**values)


def to_flags(settings: Any) -> list[str]:
    """The command line that makes a child process read the same settings, whatever its environment."""
    flags: list[str] = []
    for field, _, kind, repeatable in fields_of(type(settings)):
        value = getattr(settings, field.name)
        if kind is bool:
            flags.append(flag_name(field) if value else "--no-" + field.name.replace("_", "-"))
        elif repeatable:
            flags += [part for item in value for part in (flag_name(field), str(item))]
        elif value is not None:
            flags += [flag_name(field), str(value)]
    return flags


def run(command: click.Command, argv: Sequence[str] | None = None, prog_name: str | None = None) -> int:
    """Run a click command; its usage errors are one plain line on stderr. Returns the exit status."""
    try:
        result = command.main(args=list(argv) if argv is not None else None, prog_name=prog_name, standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
        return error.exit_code
    return result if isinstance(result, int) else 0
