"""Tokenizing and templating in threads, so that a long prompt never holds up the tokens of others."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from headrace._common.errors import StartupError, TemplateError
from headrace._common.model_folder import ModelFolder, read_text
from headrace._common.tokenizing import Piece, Tokenizer
from headrace_router.text import reasoning
from headrace_router.text.chat import ChatEncoder, Marked, template_messages
from headrace_router.text.normalize import normalize
from headrace_router.text.template import MAX_SECONDS, ChatTemplate
from headrace_router.text.tools import formats
from headrace_router.text.tools.prompting import adapt

T = TypeVar("T")


SLICE = 16_384  # characters
Turn = Literal["new", "continue", "none"]  # a new one of the assistant; its last message goes on; nothing is begun


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
        self._template, self._template_error = _load_template(folder, template_path)
        self.tools = formats.choose(tool_parser, self.mentions)
        self.reasoning = reasoning.choose(reasoning_parser, self.mentions)
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
        variables: dict[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation.

        Args:
            turn: how it ends; None: the assistant goes on where it stopped if it spoke last, else it is its turn.
            variables: more of them for the template; their strings are plain text, as messages are.

        Raises:
            TooLong: it has many more tokens than `most`.
            TemplateError: there is no template, or it refused the conversation or failed.
            InvalidRequest: the messages cannot be put before a template.
        """
        try:
            async with asyncio.timeout(2 * MAX_SECONDS):
                return await self.run(self._render, messages, most, turn, variables or {})
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
        return self._template is not None and self._template.mentions(word)

    def _render(
        self, messages: list[dict[str, Any]], most: int | None, turn: Turn | None, variables: dict[str, Any]
    ) -> ChatPrompt:
        if self._template is None:
            raise TemplateError(self._template_error)
        ready = template_messages(messages)
        if not self._template.mentions("developer"):  # the newer name of the system role
            ready = [{**m, "role": "system"} if m["role"] == "developer" else m for m in ready]
        if turn is None:
            last = ready[-1]
            turn = "continue" if last["role"] == "assistant" and not last.get("tool_calls") else "new"
        ready = adapt(ready, variables.get("tools"), self._template.mentions)
        ready = [{**m, "content": self.normalize(m["content"])} for m in ready]
        marked = Marked([*ready, variables], self._chat.control)
        *made, extra = marked.messages
        final = made[-1]["content"]
        rendered = self._template.render(made, add_generation_prompt=turn == "new", **extra)
        if turn == "continue":
            rendered = _cut_after(rendered, final)
        plain = marked.plain(rendered)
        self._check_length(plain, most)
        return ChatPrompt(plain, self._chat.encode(marked.parts(rendered)))


def _cut_after(rendered: str, final: str) -> str:
    """The rendered text up to the end of the last message's content, as transformers' `continue_final_message` cuts.

    Raises:
        TemplateError: the template does not write that content as it is.
    """
    content = final.strip()
    at = rendered.rfind(content) if content else -1
    if at < 0:
        raise TemplateError("Template error: the chat template does not write the last assistant message as it is")
    kept = content + re.match(r"\s*", final[len(final.rstrip()):])[0]  # type: ignore[index]
    end = at + (len(kept) if rendered.startswith(kept, at) else len(content))
    return rendered[:end]


def _load_template(folder: ModelFolder, path: str | None) -> tuple[ChatTemplate | None, str]:
    """(template, None), or (None, why there is none). A model without a usable template still serves raw prompts.

    Raises:
        StartupError: the operator names a file that cannot be read.
    """
    source = folder.chat_template if path is None else _template_file(Path(path))
    if source is None:
        return None, "Template error: the model has no chat template"
    try:
        return ChatTemplate(source, folder.special_texts), ""
    except TemplateError as error:
        return None, str(error)


def _template_file(path: Path) -> str | None:
    text = read_text(path)
    if path.suffix != ".json":
        return text
    try:
        template = json.loads(text).get("chat_template")
    except (ValueError, AttributeError):
        raise StartupError(f"{path} holds no JSON object") from None
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not isinstance(template, str):
        raise StartupError(f"{path} has no chat_template")
    return template
