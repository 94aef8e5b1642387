"""Scripts for the shard that say a text, whatever the prompt."""

from __future__ import annotations

from headrace.v1 import generation_pb2 as pb
from tests.fakes.routers import Running
from tests.fakes.text_models import EOS_ID


def say(server: Running, text: str) -> None:
    """Every request gets this text, token by token, and the end token."""
    tokenizer = server.router.service.text.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS_ID]
    server.shard.script = lambda request, index: ids[index] if index < len(ids) else EOS_ID


def sent(server: Running) -> list[pb.Request]:
    """All requests that the shard has had."""
    return [request for prefill in server.shard.prefills for request in prefill.requests]


def prompts(server: Running) -> list[str]:
    """The texts of their prompts."""
    tokenizer = server.router.service.text.tokenizer
    return [tokenizer.decode(list(request.token_ids.ids), skip_special_tokens=False) for request in sent(server)]
