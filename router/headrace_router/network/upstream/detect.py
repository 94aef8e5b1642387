"""Which server is there: its API, its model and how much it takes are what its own routes tell."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import aiohttp

from headrace._common.errors import StartupError
from headrace_router.network.upstream.apis import Api, OpenAI, Tgi

log = logging.getLogger(__name__)

ASK_SECONDS = 5.0
PATIENCE = 60.0  # seconds for a server that is just starting
SLOTS = 32  # of a server that does not say how many requests it runs at once

# Parameters beyond OpenAI's: our name -> theirs.
_VLLM = {
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty", "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}
_LLAMA = {
    "top_k": "top_k", "min_p": "min_p", "typical_p": "typical_p", "repetition_penalty": "repeat_penalty",
    "ignore_eos": "ignore_eos",
}


# What turns their own defaults off.
_OFF = {"top_p": 1.0, "min_p": 0.0}
_VLLM_OFF = {**_OFF, "top_k": -1, "repetition_penalty": 1.0}  # a model's generation_config.json would count
_LLAMA_OFF = {**_OFF, "top_k": 0, "typical_p": 1.0, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class Found:
    """A server. `max_total`: its window in tokens, None if it does not say."""

    kind: str
    api: Api
    model: str
    max_total: int | None
    slots: int = SLOTS
    max_input: int | None = None
    tokenizer_hash: str | None = None


async def detect(client: aiohttp.ClientSession, url: str, api: str, model: str | None) -> Found:
    """Ask the server until it answers, for a while. `api`: auto, tgi or openai; `model`: the one to use, by its name.

    Raises:
        StartupError: it does not answer, wants a key, or is no server of a known kind.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return await _detect(client, url, api, model)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            if time.monotonic() > end:
                raise StartupError(f"--upstream {url} does not answer: {why}") from None
            log.info("waiting for the upstream %s: %s", url, why)
        await asyncio.sleep(1.0)


async def _detect(client: aiohttp.ClientSession, url: str, api: str, model: str | None) -> Found:
    info = await _ask(client, f"{url}/info")
    is_tgi = isinstance(info, dict) and "model_id" in info
    if is_tgi and api != "openai":
        return Found(
            "tgi", Tgi(), str(info["model_id"]), _number(info, "max_total_tokens"),
            max_input=_number(info, "max_input_tokens"), tokenizer_hash=info.get("tokenizer_hash"),
        )
    if api == "tgi":
        raise StartupError(f"--upstream {url} has no /info of a TGI server")
    listed = await _ask(client, f"{url}/v1/models")
    entry = _choose(listed, url, model)
    name = str(entry["id"])
    props = await _ask(client, f"{url}/props")
    if isinstance(props, dict) and isinstance(props.get("default_generation_settings"), dict):
        api_of = OpenAI(name, _LLAMA, frozenset({"json_schema"}), "json_schema", {**_LLAMA_OFF, "logprobs": 1})
        window = _number(props["default_generation_settings"], "n_ctx")
        return Found("llama.cpp", api_of, name, window, _number(props, "total_slots") or 1)
    window = _number(entry, "max_model_len")
    extra = {**_VLLM_OFF, "logprobs": 0, "return_token_ids": True}
    if is_tgi and info.get("router") == "headrace-router":
        names = {**_VLLM, "typical_p": "typical_p"}
        api_of = OpenAI(name, names, frozenset({"json_schema"}), extra=extra)
        return Found("headrace", api_of, name, window, max_input=_number(info, "max_input_tokens"),
                     tokenizer_hash=info.get("tokenizer_hash"))
    if entry.get("owned_by") == "vllm":
        return Found("vllm", OpenAI(name, _VLLM, frozenset({"json_schema"}), extra=extra), name, window)
    return Found("openai", OpenAI(name, extra={"top_p": 1.0}), name, window)


def _choose(listed: Any, url: str, model: str | None) -> dict[str, Any]:
    """The entry of the model in OpenAI's list.

    Raises:
        StartupError: there is no such list, or it does not name one model.
    """
    rows = listed.get("data") if isinstance(listed, dict) else None
    if not rows or not all(isinstance(row, dict) and "id" in row for row in rows):
        raise StartupError(f"--upstream {url}: neither /info nor /v1/models answers as TGI's or OpenAI's API does")
    named = [row for row in rows if model is not None and PurePath(str(row["id"])).name == PurePath(model).name]
    if len(named or rows) > 1:
        names = ", ".join(str(row["id"]) for row in rows[:10])
        raise StartupError(f"--upstream {url} serves several models, say which with --model-id: {names}")
    chosen: dict[str, Any] = (named or rows)[0]
    return chosen


async def _ask(client: aiohttp.ClientSession, url: str) -> Any:
    """The JSON that a route answers; None if there is no such route.

    Raises:
        StartupError: a key is wanted.
        aiohttp.ClientError, OSError, TimeoutError: the server is not there, or not ready.
    """
    async with client.get(url, timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)) as reply:
        if reply.status in (401, 403):
            raise StartupError(f"--upstream {url} answers {reply.status}: give its key with --upstream-api-key")
        if reply.status in (429, 502, 503, 504):
            raise aiohttp.ClientError(f"status {reply.status}")
        if reply.status != 200:
            return None
        try:
            return await reply.json(content_type=None)
        except ValueError:
            return None


def _number(row: dict[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) and value > 0 else None
