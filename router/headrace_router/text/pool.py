"""Tokenizing and templating in threads, so that a long prompt never holds up the tokens of others."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace._common.errors import StartupError, TemplateError
from headrace._common.model_folder import ModelFolder, named_templates, read_text
from headrace._common.tokenizing import Piece, Tokenizer
from headrace_router.text import reasoning
from headrace_router.text.chat import ChatEncoder, template_messages
from headrace_router.text.normalize import normalize
from headrace_router.text.renderer import ChatRenderer, Turn
from headrace_router.text.template_limits import MAX_SECONDS
from headrace_router.text.tools import formats

T = TypeVar("T")


SLICE = 16_384  # characters


class TooLong(Exception):
    """A text has more tokens than could ever be served; they were not all counted."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"more than {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation."""

    text: str
    ids: list[int]


class TextPool:
    """The model's tokenizer and chat template behind a few threads."""

    def __init__(
        self, folder: ModelFolder, workers: int, template_path: str | None, normalize: str = "none",
        tool_parser: str = "auto", reasoning_parser: str = "auto",
    ) -> None:
        """`normalize`, `tool_parser`, `reasoning_parser`: as the router's settings have them.

        Raises:
            StartupError: the tokenizer or the template file cannot be read.
        """
        self.tokenizer = Tokenizer(folder.tokenizer_path)
        self._chat = ChatEncoder(self.tokenizer)
        self._renderer, self._template_error = _load_templates(folder, template_path, self.tokenizer)
        self.tools = formats.choose(tool_parser, self._shows)
        self.reasoning = reasoning.choose(reasoning_parser, self._shows)
        self._mode = normalize
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do something long in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def normalize(self, text: str) -> str:
        """What a user wrote, as the operator wants it."""
        return normalize(text, self._mode)

    async def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer adds.

        Raises:
            TooLong: there are many more than `most`.
        """
        return await self.run(self._encode, text, most)

    def _encode(self, text: str, most: int | None) -> list[int]:
        self._check_length(text, most)
        return self.tokenizer.encode(text)

    def _check_length(self, text: str, most: int | None) -> None:
        """Refuse a hopeless text before it costs the memory of all its tokens. Cutting it adds a few tokens, never
        twice as many.
        """
        if most is None or len(text) < 8 * most + SLICE:
            return
        if self.tokenizer.least_tokens(text) > most:
            raise TooLong(most)
        count = 0
        for start in range(0, len(text), SLICE):
            count += len(self.tokenizer.encode(text[start : start + SLICE], add_special_tokens=False))
            if count > 2 * most + SLICE:
                raise TooLong(most)

    async def chat(
        self, messages: list[dict[str, Any]], most: int | None = None, turn: Turn | None = None,
        variables: dict[str, Any] | None = None, complete: bool = False,
    ) -> ChatPrompt:
        """The prompt of a conversation.

        Args:
            turn: how it ends; None: the assistant goes on where it stopped if it spoke last, else it is its turn.
            variables: more of them for the template; their strings are plain text, as messages are.
            complete: write what the template does not know of tools and calls into the messages.

        Raises:
            TooLong: it has many more tokens than `most`.
            TemplateError: there is no template, or it refused the conversation or failed.
            InvalidRequest: the messages cannot be put before a template.
        """
        try:
            async with asyncio.timeout(2 * MAX_SECONDS):
                return await self.run(self._render, messages, most, turn, variables or {}, complete)
        except TimeoutError:
            raise TemplateError("Template error: the chat template takes too long") from None

    def chat_pieces(self, prompt: ChatPrompt) -> list[Piece]:
        """The tokens of a rendered conversation, with offsets into its text. Call it in one of the threads."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        made, start = [], 0
        for token_id in prompt.ids:
            stop = start + len(decoder.decode(self.tokenizer.bytes_of(token_id)))
            made.append(Piece(token_id, prompt.text[start:stop], start, stop))
            start = stop
        return made

    def mentions(self, word: str) -> bool:
        """Does the chat template hold `word`?"""
        return self._renderer is not None and self._renderer.mentions(word)

    def _shows(self, text: str) -> bool:
        """Does any of the chat templates hold this?"""
        return self._renderer is not None and self._renderer.shows(text)

    def _render(
        self, messages: list[dict[str, Any]], most: int | None, turn: Turn | None, variables: dict[str, Any], complete: bool
    ) -> ChatPrompt:
        if self._renderer is None:
            raise TemplateError(self._template_error)
        ready = [{**m, "content": self._normal(m["content"])} for m in template_messages(messages)]
        if turn is None:
            calls = ready[-1].get("tool_calls") or ready[-1].get("function_call")
            turn = "continue" if ready[-1]["role"] == "assistant" and not calls else "new"
        rendered = self._renderer.render(ready, turn, variables, complete)
        text = rendered.text
        self._check_length(text, most)
        return ChatPrompt(text, self._chat.encode(rendered.parts))

    def _normal(self, content: Any) -> Any:
        """A message's content with its text normalized; parts become one text then."""
        if self._mode == "none":
            return content
        return self.normalize(content if isinstance(content, str) else "".join(part["text"] for part in content))


def _load_templates(folder: ModelFolder, path: str | None, tokenizer: Tokenizer) -> tuple[ChatRenderer | None, str]:
    """(the templates, ""), or (None, why there are none). A model without a usable template still serves raw prompts.

    Raises:
        StartupError: the operator names a file that cannot be read.
    """
    sources = folder.chat_templates if path is None else _template_file(Path(path))
    if not sources:
        return None, "Template error: the model has no chat template"
    try:
        return ChatRenderer(sources, folder.special_texts, tokenizer), ""
    except TemplateError as error:
        return None, str(error)


def _template_file(path: Path) -> dict[str, str]:
    text = read_text(path)
    if path.suffix != ".json":
        return {"default": text}
    try:
        found = named_templates(json.loads(text).get("chat_template"))
    except (ValueError, AttributeError):
        raise StartupError(f"{path} holds no JSON object") from None
    if not found:
        raise StartupError(f"{path} has no chat_template")
    return found
