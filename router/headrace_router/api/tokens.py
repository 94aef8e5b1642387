"""Tokens without generation: POST /tokenize (TGI's body and vLLM's), /detokenize and /chat_tokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from headrace._common.errors import InvalidRequest
from headrace_router.api.bodies import read_json, refuse_given
from headrace_router.api.chat_requests import encode_chat
from headrace_router.api.native_types import SimpleToken, simple_tokens
from headrace_router.api.openai_types import ChatPrompt, Message
from headrace_router.api.tool_types import Tool
from headrace_router.service import SERVICE, Service
from headrace_router.validation import check_token_ids


class TokenizeBody(Struct, kw_only=True):
    """Body of /tokenize: `inputs` as TGI has it, or vLLM's `prompt` or `messages`."""

    inputs: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class Tokenized(Struct):
    """vLLM's answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Struct):
    """Body of /detokenize."""

    tokens: list[int]


class Detokenized(Struct):
    """Answer of /detokenize."""

    prompt: str


class ChatTokenized(Struct):
    """Answer of /chat_tokenize."""

    tokenize_response: list[SimpleToken]
    templated_text: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
_chat_decoder = msgspec.json.Decoder(ChatPrompt)
_encode = msgspec.json.Encoder().encode


async def tokenize(request: web.Request) -> web.Response:
    """TGI's answer to `inputs`: the tokens with their offsets in characters. vLLM's to the others: their ids."""
    service = request.app[SERVICE]
    body = await read_json(request, _tokenize_decoder, service.settings.payload_limit)
    given = [name for name in ("inputs", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("one of `inputs`, `prompt` and `messages` is needed", "inputs")
    if given != ["messages"] and not getattr(body, given[0]):
        raise InvalidRequest(f"`{given[0]}` cannot be empty", given[0])
    if body.inputs is not None:
        text, special = service.text.normalize(body.inputs), body.add_special_tokens is not False
        made = await service.text.run(lambda: _encode(simple_tokens(service.text.tokenizer.pieces(text, special))))
    else:
        made = await _ids(service, body)
    return web.Response(body=made, content_type="application/json")


async def _ids(service: Service, body: TokenizeBody) -> bytes:
    pool = service.text
    if body.messages is not None:
        refuse_given(add_special_tokens=body.add_special_tokens)
        chat = ChatPrompt(
            messages=body.messages, add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        ids = (await encode_chat(service, chat)).ids
    else:
        text = pool.normalize(body.prompt or "")
        ids = await pool.run(pool.tokenizer.encode, text, body.add_special_tokens is not False)
    strings = [pool.tokenizer.text_of(i) for i in ids] if body.return_token_strs else None
    return _encode(Tokenized(len(ids), service.limits.max_total_tokens, ids, strings))


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special ones included."""
    service = request.app[SERVICE]
    body = await read_json(request, _detokenize_decoder, service.settings.payload_limit)
    check_token_ids("tokens", body.tokens, service.limits)
    text = await service.text.run(service.text.tokenizer.decode, body.tokens, False)
    return web.Response(body=_encode(Detokenized(text)), content_type="application/json")


async def chat_tokenize(request: web.Request) -> web.Response:
    """The text that the template makes of a conversation, and its tokens."""
    service = request.app[SERVICE]
    body = await read_json(request, _chat_decoder, service.settings.payload_limit)
    prompt = await encode_chat(service, body)

    def answer() -> bytes:
        return _encode(ChatTokenized(simple_tokens(service.text.chat_pieces(prompt)), prompt.text))

    return web.Response(body=await service.text.run(answer), content_type="application/json")
