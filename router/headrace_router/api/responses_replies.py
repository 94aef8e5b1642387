"""Tokens into the answer and the events of /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from headrace._common.errors import HeadraceError
from headrace_router import sse
from headrace_router.api import responses_types as shapes
from headrace_router.api.chat_requests import PreparedChat
from headrace_router.api.choices import end_of
from headrace_router.api.errors import openai_body
from headrace_router.service import Service
from headrace_router.text.parts import CallBegin, Part, Reasoning, Text
from headrace_router.types import End, Token

Emit = Callable[[shapes.AnyEvent], None]


class Output:
    """The items of an output, built part by part; each change is told as an event."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._open: shapes.OutputItem | None = None
        self.items: list[shapes.OutputItem] = []

    def add(self, part: Part) -> None:
        """The next part of the output."""
        if isinstance(part, CallBegin):
            self._begin(shapes.OutputCall(_id("fc"), "in_progress", _id("call"), part.name, ""))
            return
        if isinstance(part, Text) and not isinstance(self._open, shapes.OutputMessage):
            self._begin(shapes.OutputMessage(_id("msg"), "in_progress", []))
        elif isinstance(part, Reasoning) and not isinstance(self._open, shapes.OutputReasoning):
            self._begin(shapes.OutputReasoning(_id("rs"), "in_progress", []))
        self._extend(part.text)

    def close(self, status: shapes.Status) -> None:
        """The last item ends."""
        item = self._open
        if item is None:
            return
        item.status, self._open = status, None
        at = len(self.items) - 1
        if isinstance(item, shapes.OutputCall):
            self._emit(shapes.ArgumentsDone(name=item.name, arguments=item.arguments, item_id=item.id, output_index=at))
        elif isinstance(item, shapes.OutputMessage):
            self._emit(shapes.TextDone(text=item.content[0].text, item_id=item.id, output_index=at))
            self._emit(shapes.PartDone(part=item.content[0], item_id=item.id, output_index=at))
        else:
            self._emit(shapes.ReasoningDone(text=item.content[0].text, item_id=item.id, output_index=at))
            self._emit(shapes.PartDone(part=item.content[0], item_id=item.id, output_index=at))
        self._emit(shapes.ItemDone(output_index=at, item=item))

    def _begin(self, item: shapes.OutputItem) -> None:
        self.close("completed")
        self._open = item
        self.items.append(item)
        index = len(self.items) - 1
        self._emit(shapes.ItemAdded(output_index=index, item=item))
        if isinstance(item, shapes.OutputCall):
            return
        part: shapes.OutputPart
        if isinstance(item, shapes.OutputMessage):
            part = shapes.OutputText("")
            item.content.append(part)
        else:
            part = shapes.ReasoningText("")
            item.content.append(part)
        self._emit(shapes.PartAdded(item_id=item.id, output_index=index, part=part))

    def _extend(self, text: str) -> None:
        item, index = self._open, len(self.items) - 1
        assert item is not None
        if isinstance(item, shapes.OutputCall):
            item.arguments += text
            self._emit(shapes.ArgumentsDelta(item_id=item.id, output_index=index, delta=text))
        elif isinstance(item, shapes.OutputMessage):
            item.content[0].text += text
            self._emit(shapes.TextDelta(item_id=item.id, output_index=index, delta=text))
        else:
            item.content[0].text += text
            self._emit(shapes.ReasoningDelta(item_id=item.id, output_index=index, delta=text))


class ResponseReplies:
    """The answer to one call of /v1/responses."""

    def __init__(self, service: Service, prepared: PreparedChat, body: shapes.ResponseBody) -> None:
        self._number = 0
        self._frames = b""
        self._reader = prepared.reading.reader(whole=not body.stream)
        self._output = Output(self._emit if body.stream else lambda event: None)
        self._begun = False
        self._response = shapes.Response(
            id=_id("resp"), created_at=int(time.time()), status="in_progress", model=service.model_name,
            output=self._output.items, instructions=body.instructions, max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {}, parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or shapes.ReasoningOptions(),
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text if body.text is not None and body.text.format is not None else shapes.TextOptions({"type": "text"}),
            tool_choice=body.tool_choice or "auto", tools=body.tools or [], top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
        )

    def frames(self, index: int, token: Token) -> bytes:
        """The events of one token."""
        self._begin()
        self._read(token)
        return self._taken()

    def last_frames(self, ends: list[End]) -> bytes:
        """The last event."""
        self._end(ends[0])
        cut = self._response.status == "incomplete"
        self._emit((shapes.Incompleted if cut else shapes.Completed)(response=self._response))
        return self._taken()

    def error_frames(self, error: HeadraceError) -> bytes:
        """The last event of a stream that fails."""
        self._begin()
        self._output.close("incomplete")
        code = openai_body(error)["error"]["type"]
        self._response.status, self._response.error = "failed", shapes.ResponseError(code, str(error))
        self._emit(shapes.Failed(response=self._response))
        return self._taken()

    def whole(self, choices: list[list[Token]]) -> bytes:
        """The answer of a call that does not stream."""
        for token in choices[0]:
            self._read(token)
        self._end(end_of(choices[0]))
        return shapes.encode(self._response)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._emit(shapes.Created(response=self._response))
            self._emit(shapes.InProgress(response=self._response))

    def _read(self, token: Token) -> None:
        parts = self._reader.push(token.text)
        if token.end is not None:
            parts += self._reader.finish(token.end.finish_reason == "length")
        for part in parts:
            self._output.add(part)

    def _end(self, end: End) -> None:
        """Everything has been read."""
        cut = end.finish_reason == "length"
        if not self._output.items:
            self._output.add(Text(""))
        self._output.close("incomplete" if cut else "completed")
        made = self._response
        made.status = "incomplete" if cut else "completed"
        made.incomplete_details = shapes.IncompleteDetails("max_output_tokens") if cut else None
        made.usage = shapes.ResponseUsage(
            end.input_length, shapes.InputDetails(end.cached_tokens), end.generated_tokens,
            shapes.OutputDetails(self._reader.reasoning_tokens), end.input_length + end.generated_tokens,
        )

    def _emit(self, event: shapes.AnyEvent) -> None:
        event.sequence_number = self._number
        self._number += 1
        self._frames += sse.frame(shapes.encode(event), str(type(event).__struct_config__.tag))

    def _taken(self) -> bytes:
        made, self._frames = self._frames, b""
        return made


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
