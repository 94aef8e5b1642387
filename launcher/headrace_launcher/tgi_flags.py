"""Flags of Text Generation Inference's launcher that this one treats in a way of its own.

`WITHOUT_MEANING` are accepted so that existing command lines go on working: each prints one warning line and changes
nothing. `NOT_BUILT` would change what is served, so they are refused rather than ignored. None of them is in the help.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import click

# flag -> (takes a value, why it has no meaning here)
WITHOUT_MEANING: dict[str, tuple[bool, str]] = {
    "--cuda-graphs": (True, "graphs are captured as the device needs them"),
    "--cuda-memory-fraction": (True, "the KV cache is sized by --max-batch-total-tokens or by free memory"),
    "--disable-custom-kernels": (False, "no model has kernels that would need this"),
    "--enable-prefill-logprobs": (False, "`decoder_input_details` is always answered"),
    "--master-addr": (True, "all shards run on this host, and meet over a socket of their own"),
    "--master-port": (True, "all shards run on this host, and meet over a socket of their own"),
    "--max-waiting-tokens": (True, "new requests join a running batch at every step"),
    "--ngrok": (False, "there is no tunnel"),
    "--ngrok-authtoken": (True, "there is no tunnel"),
    "--ngrok-edge": (True, "there is no tunnel"),
    "--prometheus-port": (True, "/metrics is served on --port"),
    "--usage-stats": (True, "no usage is reported to anybody"),
    "--waiting-served-ratio": (True, "new requests join a running batch at every step"),
}

# flag -> takes a value
NOT_BUILT: dict[str, bool] = {
    "--kv-cache-dtype": True,
    "--lora-adapters": True,
    "--otlp-endpoint": True,
    "--otlp-service-name": True,
    "--rope-factor": True,
    "--rope-scaling": True,
    "--trust-remote-code": False,
    "--weights-cache-override": True,
}


def parameters() -> list[click.Parameter]:
    """Hidden click options for both tables; their values stay out of the command's own parameters."""
    made: list[click.Parameter] = []
    for flag, (takes_value, why) in WITHOUT_MEANING.items():
        made.append(_hidden(flag, takes_value, _warn(flag, why)))
    for flag, takes_value in NOT_BUILT.items():
        made.append(_hidden(flag, takes_value, _refuse(flag)))
    return made


def warn_of_environment(warn: Callable[[str], None], env: Mapping[str, str] | None = None) -> None:
    """Name each variable that asks for something of `NOT_BUILT`: it is not honoured."""
    given = os.environ if env is None else env
    for flag in NOT_BUILT:
        name = flag[2:].upper().replace("-", "_")
        if given.get(name, "").lower() not in ("", "0", "false"):
            warn(f"environment variable {name} is ignored: {flag} is not supported yet")


_Callback = Callable[[click.Context, click.Parameter, object], None]


def _hidden(flag: str, takes_value: bool, callback: _Callback) -> click.Option:
    if takes_value:
        return click.Option([flag], hidden=True, expose_value=False, multiple=True, callback=callback)
    return click.Option([flag], hidden=True, expose_value=False, is_flag=True, callback=callback)


def _warn(flag: str, why: str) -> _Callback:
    def callback(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value and not context.resilient_parsing:
            click.echo(f"warning: {flag} has no effect: {why}", err=True)

    return callback


def _refuse(flag: str) -> _Callback:
    def callback(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value and not context.resilient_parsing:
            raise click.UsageError(f"{flag} is not supported yet")

    return callback
