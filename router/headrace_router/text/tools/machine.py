"""The base of all formats: a coroutine that is sent one character after the other.

Since it never sees more than the next character, it makes no difference how a text is cut into pieces. What may turn out
to be markup is held back; if it is none, it is text. White space beside a call is dropped.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any

from headrace_router.text.parts import Arguments, CallBegin, Part, Text, merged
from headrace_router.text.tools.json_scanner import JsonScanner

Tools = Mapping[str, dict[str, Any]]
Reading = Generator[None, str | None, None]  # reads characters; None: there are no more


class End(Exception):
    """No character follows."""


class Malformed(Exception):
    """What looked like a call is none."""


class Call:
    """The call that is being read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""  # as far as they are not told
        self.whole = False  # the arguments are
        self.begun = False  # it is told


class Machine(ABC):
    """Reads the output of a model.

    Args:
        tools: the schemas of their arguments by their names; a call of another one is text.
        whole: tell a call only when it is whole, so that one that breaks off is text; else its arguments as they come.
    """

    def __init__(self, tools: Tools, whole: bool) -> None:
        self._tools, self._whole = tools, whole
        self._parts: list[Part] = []
        self._held: list[str] = []  # what was read and is neither told nor dropped
        self._again: str | None = None  # to be read once more
        self._blank = ""  # white space that is text unless a call follows
        self._after_call = False
        self._cut = False
        self._call = Call()
        self._reading = self._run()
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """The parts that the next piece of text makes."""
        for char in text:
            self._reading.send(char)
        return self._taken()

    def finish(self, cut: bool) -> list[Part]:
        """The parts that are left when nothing follows. `cut`: the model would have gone on."""
        self._cut = cut
        with contextlib.suppress(StopIteration):
            self._reading.send(None)
        if not self._after_call and self._blank:
            self._parts.append(Text(self._blank))
        return self._taken()

    @abstractmethod
    def read_output(self) -> Reading:
        """The whole output; left by `End`."""

    def _run(self) -> Reading:
        try:
            yield from self.read_output()
        except End:
            self.say()

    def _taken(self) -> list[Part]:
        made, self._parts = merged(self._parts), []
        return made

    # --- reading ---

    def read(self) -> Generator[None, str | None, str]:
        """The next character.

        Raises:
            End: there is none.
        """
        if self._again is not None:
            char, self._again = self._again, None
        else:
            given = yield
            if given is None:
                raise End
            char = given
        self._held.append(char)
        return char

    def unread(self, char: str) -> None:
        """Read the last character once more."""
        self._held.pop()
        self._again = char

    def refuse(self, char: str) -> Malformed:
        """The last character cannot follow."""
        self.unread(char)
        return Malformed()

    def skip_blanks(self) -> Generator[None, str | None, str]:
        """The next character that is no white space."""
        while (char := (yield from self.read())).isspace():
            pass
        return char

    def find(self, marker: str) -> Reading:
        """Tell all text up to a marker, and read that."""
        self.say()
        while (held := "".join(self._held)) != marker:
            if not marker.startswith(held):
                kept = next(n for n in range(len(held) - 1, -1, -1) if marker.startswith(held[len(held) - n :]))
                self.say(keep=kept)
            else:
                yield from self.read()

    def skip(self, closing: str) -> Reading:
        """Drop a marker if it is what follows."""
        self._held.clear()
        try:
            char = yield from self.skip_blanks()
            for place, wanted in enumerate(closing):
                if place:
                    char = yield from self.read()
                if char != wanted:
                    raise self.refuse(char)
            self._held.clear()
        except Malformed:
            self.say()
        except End:
            self._held.clear()
            raise

    def value(self, first: str) -> Generator[None, str | None, str]:
        """The JSON value that begins with `first`, as it is written."""
        scanner, made, char = JsonScanner(), "", first
        while True:
            status = scanner.push(char)
            if status == "bad":
                raise self.refuse(char)
            if status == "done before":
                self.unread(char)
                return made
            made += char
            if status == "done":
                return made
            char = yield from self.read()

    def arguments(self, first: str) -> Reading:
        """The arguments of the present call, told as they come."""
        scanner, char = JsonScanner(), first
        while True:
            within = scanner.in_string
            status = scanner.push(char)
            if status not in ("more", "done"):
                raise self.refuse(char)
            self._call.arguments += json.dumps(char)[1:-1] if within and char < " " else char
            self._call.whole = status == "done"
            if self._call.name is not None and not self._whole and self._call.arguments != "{":
                self.tell()
            if self._call.whole:
                return
            char = yield from self.read()

    # --- telling ---

    def say(self, keep: int = 0) -> None:
        """What is held is text, but for the last `keep` characters."""
        at = len(self._held) - keep
        text, self._held = self._blank + "".join(self._held[:at]), self._held[at:]
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._after_call = False
            self._parts.append(Text(kept))

    def tell(self) -> None:
        """What is known of the present call and was not told."""
        call = self._call
        if not call.begun:
            assert call.name is not None
            self._parts.append(CallBegin(call.name))
            call.begun, self._after_call, self._blank = True, True, ""
        if call.arguments:
            self._parts.append(Arguments(call.arguments))
            call.arguments = ""

    def settle(self, ended: bool) -> bool:
        """The present call can go no further: was it one? `ended`: because the output has ended."""
        call = self._call
        if call.name is not None and (call.whole or call.begun or (ended and self._cut and call.arguments)):
            self.tell()
            self._held.clear()
            return True
        self.say()
        return False

    def check_name(self, name: object) -> str:
        """
        Raises:
            Malformed: there is no such tool.
        """
        if not isinstance(name, str) or name not in self._tools:
            raise Malformed
        return name
