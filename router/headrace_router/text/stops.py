"""Stop strings in text that arrives in pieces.

Each stop string is matched by the automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977), one character after
the other, so that the result does not depend on how the text is cut into pieces. The failure table grows as far as a
match has ever got: a stop string of a megabyte costs nothing until the output begins to look like it.
"""

from __future__ import annotations


class _Matcher:
    """How much of one stop string the text ends with."""

    __slots__ = ("_fail", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._fail = [0]
        self.matched = 0

    def push(self, char: str) -> bool:
        """Take a character; True if the stop string is now complete."""
        stop, length = self.stop, self.matched
        while length and stop[length] != char:
            length = self._failure(length)
        if stop[length] == char:
            length += 1
        self.matched = length
        return length == len(stop)

    def _failure(self, length: int) -> int:
        """Length of the longest proper border of the first `length` characters."""
        stop, fail = self.stop, self._fail
        while len(fail) < length:
            border, char = fail[-1], stop[len(fail)]
            while border and stop[border] != char:
                border = fail[border - 1]
            fail.append(border + 1 if stop[border] == char else 0)
        return fail[length - 1]


class StopFinder:
    """Passes text on until the first stop string is complete.

    With `keep` the text goes out at once, the stop string included. Without, what could still become a stop string is
    held back, and the stop string is cut.
    """

    __slots__ = ("_held", "_keep", "_matchers", "found")

    def __init__(self, stops: tuple[str, ...], keep: bool) -> None:
        """`stops`: not empty strings. If several are complete at the same character, the longest one counts."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that may go out now. After a stop string was found nothing does."""
        if self.found is not None:
            return ""
        for i, char in enumerate(piece):
            complete = [m.stop for m in self._matchers if m.push(char)]
            if complete:
                self.found = max(complete, key=len)
                return self._out(piece[: i + 1], len(self.found))
        return self._out(piece, max(m.matched for m in self._matchers))

    def _out(self, piece: str, back: int) -> str:
        """`piece` and what was held, without the last `back` characters; those are held, or dropped at a stop."""
        if self._keep:
            return piece
        text = self._held + piece
        cut = len(text) - back
        self._held = "" if self.found is not None else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held for a stop string that never came."""
        held, self._held = self._held, ""
        return held
