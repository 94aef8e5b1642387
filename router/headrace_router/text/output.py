"""The text of one running request: detokenizing, then stop strings."""

from __future__ import annotations

from headrace._common.detokenizer import Detokenizer
from headrace._common.tokenizing import Tokenizer
from headrace_router.text.stops import StopFinder
from headrace_router.types import GenerateRequest


class OutputText:
    """Turns output tokens into the text that leaves. It survives preemption: a half-written character waits here."""

    __slots__ = ("_detokenizer", "_parts", "_stops", "_unstoppable")

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], keep_stop: bool, min_tokens: int = 0,
        shown: tuple[int, ...] = (),
    ) -> None:
        """`min_tokens`: the text of the first ones does not count as the beginning of a stop string. `shown`: special tokens
        that are text here.
        """
        special = tokenizer.special_ids.difference(shown) if shown else tokenizer.special_ids
        self._detokenizer = Detokenizer(tokenizer.bytes_of, special)
        self._stops = StopFinder(stops, keep_stop) if stops else None
        self._unstoppable = min_tokens
        self._parts: list[str] = []

    def push(self, token_id: int) -> str:
        """The text that may leave with this token."""
        piece = self._detokenizer.push(token_id)
        if self._unstoppable:
            self._unstoppable -= 1
        elif piece and self._stops is not None:
            piece = self._stops.push(piece)
        if piece:
            self._parts.append(piece)
        return piece

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: GenerateRequest) -> OutputText:
        """The text of a request's output, of what it has generated elsewhere to begin with."""
        made = cls(tokenizer, request.stop, request.keep_stop, request.min_new_tokens, request.shown_tokens)
        for token_id in request.generated:
            made.push(token_id)
        return made

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return self._stops is not None and self._stops.found is not None

    @property
    def stop_string(self) -> str | None:
        """The one that is complete."""
        return self._stops.found if self._stops is not None else None

    def finish(self) -> str:
        """What is left when no token follows: bytes that never became a character, text held for a stop string."""
        if self.stopped:
            return ""
        piece = self._detokenizer.flush()
        if self._stops is not None:
            piece = self._stops.push(piece) + self._stops.flush()
        if piece:
            self._parts.append(piece)
        return piece

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)
