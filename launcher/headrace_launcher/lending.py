"""Workers on this machine: one that lends another server, and the owner's hand on all that run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Any

from headrace._common import logs
from headrace._common.errors import StartupError
from headrace_launcher.private import PREFIX, private_folder, run_base
from headrace_router.settings import LendingSettings, RouterSettings

SOCKET = "worker.sock"
ANSWER_SECONDS = 5.0


def worker_socket(stack: contextlib.ExitStack) -> str:
    """Where a worker of this process listens for its owner: in a private folder, which goes with `stack`."""
    return str(stack.enter_context(private_folder(run_base())) / SOCKET)


def lend(settings: RouterSettings, upstream: LendingSettings) -> int:
    """Lend another server until a signal; returns the exit status."""
    import uvloop

    from headrace_router.network import joining
    from headrace_router.network.upstream import worker

    logs.setup("worker", settings.log_level, settings.json_output)
    try:
        with contextlib.ExitStack() as stack:
            if settings.worker_token_file is None:
                own = joining.own_token_file(settings.gateway or "", settings.insecure)
                settings = dataclasses.replace(settings, worker_token_file=own)
            settings = dataclasses.replace(settings, worker_socket=worker_socket(stack))
            uvloop.run(worker.lend(settings, upstream, lambda text: print(text, flush=True)))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def control(do: str, name: str | None) -> int:
    """Ask running workers for their state, or tell one to pause or to resume; prints a line each. Returns the exit status."""
    workers = {state["name"]: path for path in sockets() if (state := _ask(path, "status")) is not None}
    if name is not None and name not in workers:
        print(f"error: there is no worker {name} here; running: {', '.join(workers) or 'none'}", file=sys.stderr)
        return 1
    if not workers:
        print("error: no worker runs on this machine, of this user", file=sys.stderr)
        return 1
    if do != "status" and name is None and len(workers) > 1:
        print(f"error: several workers run here, say which: {', '.join(workers)}", file=sys.stderr)
        return 1
    for path in [workers[name]] if name is not None else workers.values():
        if (state := _ask(path, do)) is not None:
            print(describe(state))
    return 0


def sockets() -> list[Path]:
    """The control sockets in this user's run folders."""
    return sorted(Path(run_base()).glob(f"{PREFIX}*/{SOCKET}"))


def describe(state: dict[str, Any]) -> str:
    """A worker's state in one line."""
    link = "connected to" if state["connected"] else "not connected to"
    rests = f"; takes nothing new: {state['resting']}" if state["resting"] else ""
    return (
        f"{state['name']}  {state['model']}, {link} {state['gateway']}; {state['running']} of {state['slots']} slots in use, "
        f"{state['done']} requests and {state['tokens']} tokens done{rests}"
    )


def _ask(path: Path, do: str) -> dict[str, Any] | None:
    """The answer of a worker; None if nobody is there."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_SECONDS)
            line.connect(str(path))
            line.sendall(json.dumps({"do": do}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(line.makefile("rb").readline())
    except (OSError, ValueError):
        return None
    return answer if "name" in answer else None
