"""What a worker needs before it can dial in: a gateway's URL that is safe to use, its own token, and a model to serve."""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.error
import urllib.request
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from headrace._common.errors import StartupError
from headrace_router.network.tokens import read_token, write_token
from headrace_router.settings import RouterSettings

log = logging.getLogger(__name__)

REGISTER = "/v1/worker/register"
ASK_SECONDS = 10.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def check_gateway(gateway: str, insecure: bool) -> None:
    """
    Raises:
        StartupError: the gateway's URL is not usable, or would show the token to the network.
    """
    url = urlsplit(gateway)
    if url.scheme not in ("ws", "wss") or not url.hostname:
        raise StartupError(f"--gateway {gateway} must be a URL that begins with wss:// or ws://")
    local = url.hostname in ("localhost", "::1") or url.hostname.startswith("127.")
    if url.scheme == "ws" and not local and not insecure:
        text = "ws:// beyond this machine shows the token to who listens on the way: use wss://, or headrace worker --insecure"
        raise StartupError(f"--gateway {gateway}: {text}")


def token(settings: RouterSettings) -> str:
    """The token of a worker.

    Raises:
        StartupError: as `check_gateway`; or there is no token, or it cannot be read.
    """
    check_gateway(settings.gateway or "", settings.insecure)
    if settings.worker_token_file is None:
        raise StartupError("--gateway needs --worker-token-file: the token that the gateway's operator has given out")
    return read_token(settings.worker_token_file)


def own_token_file(gateway: str, insecure: bool) -> str:
    """The file with the token that this user's workers have at a gateway: of earlier, or of a registration now.

    Raises:
        StartupError: as `check_gateway`; or the gateway takes no strangers, or the file cannot be written.
    """
    check_gateway(gateway, insecure)
    path = data_folder() / "workers" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', urlsplit(gateway).netloc)}.token"
    if not path.exists():
        answer = _ask(gateway, REGISTER, b"{}")
        if not isinstance(answer, dict) or "token" not in answer:
            raise StartupError(f"the gateway {gateway} gives no token: ask its operator for one, for --worker-token-file")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_token(path, str(answer["token"]))
        except FileExistsError:
            log.info("another worker has registered meanwhile")
        except OSError as error:
            raise StartupError(f"the token of this worker cannot be kept: {path}: {error.strerror}") from None
    log.info("the token of this worker is in %s; without that file, the next worker registers anew", path)
    return str(path)


def demanded_model(gateway: str, insecure: bool) -> str:
    """The model that a gateway serves: a hub id, or the name of the default model; never a path.

    Raises:
        StartupError: it does not say, or its model has no name that can be found here.
    """
    check_gateway(gateway, insecure)
    answer = _ask(gateway, "/info")
    name = answer.get("model_id") if isinstance(answer, dict) else None
    if not isinstance(name, str):
        raise StartupError(f"the gateway {gateway} does not say which model it serves: give --model-id")
    if "/" in name and not HUB_ID.fullmatch(name):
        raise StartupError(f"the gateway {gateway} serves {name[:200]}, which is no hub id: give --model-id")
    return name


def told_name(model: str) -> str:
    """What a gateway is told as a model's name: not where on this machine its files are."""
    return PurePath(model).name if PurePath(model).is_absolute() or model.startswith((".", "~")) else model


def data_folder() -> Path:
    """Where this user's lasting files go: $XDG_DATA_HOME/headrace, else ~/.local/share/headrace."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local/share").absolute() / "headrace"


def _ask(gateway: str, path: str, body: bytes | None = None) -> Any:
    """What a gateway answers over HTTP; None if that is no JSON.

    Raises:
        StartupError: it cannot be reached, or refuses.
    """
    url = "http" + gateway.rstrip("/").removeprefix("ws") + path
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ASK_SECONDS) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise StartupError(f"the gateway {gateway} answers {error.code}: {_reason(error)}") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"the gateway {gateway} cannot be asked: {getattr(error, 'reason', error)}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])[:300]
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
