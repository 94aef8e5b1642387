"""What a worker needs before it can dial in: a gateway's URL that is safe to use, and its own token."""

from __future__ import annotations

from urllib.parse import urlsplit

from headrace._common.errors import StartupError
from headrace_router.network.tokens import read_token
from headrace_router.settings import RouterSettings


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
        text = "ws:// beyond this machine shows the token to who listens on the way; use wss://, or say --insecure"
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
