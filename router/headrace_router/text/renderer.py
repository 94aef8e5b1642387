"""Conversations through a model's chat template, with what users wrote told apart from what the template wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace._common.errors import TemplateError
from headrace._common.tokenizing import Tokenizer
from headrace_router.text.chat import Marks
from headrace_router.text.template import ChatTemplate
from headrace_router.text.tools.prompting import adapt

Turn = Literal["new", "continue", "none"]  # a new one of the assistant; its last message goes on; nothing is begun

_PROBE = "probe-3f1c"  # a text that no template holds


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation, cut where users wrote control tokens: (text, it is such a token, and plain text)."""

    parts: list[tuple[str, bool]]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


class _Named:
    """One template of a model, and what it makes of messages in parts."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self._takes: dict[str, bool] = {}
        special = [text for text, is_special in tokenizer.added_texts.items() if is_special]
        literals = template.literals
        own = [t for t, is_special in tokenizer.added_texts.items() if not is_special and not t.isspace() and t in literals]
        self.special, self.control = _any_of(special), _any_of([*special, *own])

    def takes_parts(self) -> bool:
        """Does it write the text of contents that are lists of parts?"""
        return self._probe("parts", [{"type": "text", "text": _PROBE}])

    def takes_text(self) -> bool:
        """Does it write contents that are texts?"""
        return self._probe("text", _PROBE)

    def _probe(self, kind: str, content: Any) -> bool:
        if kind not in self._takes:
            try:
                written = self.template.render([{"role": "user", "content": content}])
            except TemplateError:
                written = ""
            shows_object = "'type'" in written or '"type"' in written
            self._takes[kind] = _PROBE in written and not shows_object
        return self._takes[kind]


def _any_of(texts: list[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class ChatRenderer:
    """The chat templates of a model, by name. `default` is for every conversation, `tool_use` for those with tools."""

    def __init__(self, sources: Mapping[str, str], special_texts: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`special_texts`: bos_token, eos_token, ... as templates may write them.

        Raises:
            TemplateError: a template is not Jinja, or there are several and none is the default.
        """
        if "default" not in sources:
            names = ", ".join(sorted(sources))
            raise TemplateError(f"Template error: the model has several chat templates and no default: {names}")
        self._named = {
            name: _Named(ChatTemplate(source, special_texts), tokenizer) for name, source in sources.items()
        }

    def mentions(self, word: str) -> bool:
        """Does the default template hold `word`?"""
        return self._named["default"].template.mentions(word)

    def shows(self, text: str) -> bool:
        """Does any of the templates hold this?"""
        return any(named.template.mentions(text) for named in self._named.values())

    def render(
        self, messages: list[dict[str, Any]], turn: Turn, variables: dict[str, Any], complete: bool = False
    ) -> Rendered:
        """The prompt of a conversation; what it is given stays as it is.

        Args:
            messages: at least one, as `template_messages` makes them.
            turn: how it ends.
            variables: more of them for the template, `tools` and `documents` among them.
            complete: write what the template does not know of tools and calls into the messages.

        Raises:
            TemplateError: the template refused the conversation, failed, or did not come to an end.
            InvalidRequest: no characters are left to mark anything with.
        """
        tools = variables.get("tools") is not None and "tool_use" in self._named
        named = self._named["tool_use" if tools else "default"]
        if not named.template.mentions("developer"):  # the newer name of the system role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if complete:
            messages = adapt(messages, variables.get("tools"), named.template.mentions)
        messages = [{**m, "content": _fitting(m["content"], named)} for m in messages]
        marks = Marks([messages, variables], named.control)
        marked = [marks.mark(m, named.special if m["role"] == "assistant" else named.control) for m in messages]
        more = marks.mark(variables, named.control)
        if turn == "continue":
            marked[-1]["content"] = marks.cut_behind(marked[-1]["content"])
        text = named.template.render(marked, turn == "new", **more)
        if turn == "continue":
            text = marks.cut(text)
        return Rendered(marks.parts(text, named.control))


def _fitting(content: Any, named: _Named) -> Any:
    """Content as the template takes it: parts, or their texts joined."""
    if isinstance(content, list) and not named.takes_parts():
        return "".join(part["text"] for part in content)
    if isinstance(content, str) and content and not named.takes_text() and named.takes_parts():
        return [{"type": "text", "text": content}]
    return content
