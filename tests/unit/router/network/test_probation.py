"""What a probe's answer may look like."""

from __future__ import annotations

from headrace_router.network.jobs import Event
from headrace_router.network.probation import FASTEST, judge
from headrace_router.types import End, Token

END = End("length", "", 8, 1, None, 0, 0.0, 0.0)


def heard(seconds: float, count: int = 8, attempt: int = 1, **last: object) -> list[tuple[float, Event]]:
    """An answer whose tokens came within some time."""
    tokens = [(5.0, Event("token", attempt, k + 1, k, Token(40, -0.5, "x", False))) for k in range(count)]
    terminal = Event(**{"kind": "done", "attempt": attempt, "seq": count + 1, "end": END, **last})  # type: ignore[arg-type]
    return [(5.0, Event("started", attempt, 0)), *tokens, (5.0 + seconds, terminal)]


def test_a_worker_that_answers_is_one() -> None:
    assert judge(heard(0.5)) is None
    assert judge(heard(9 / FASTEST)) is None


def test_what_no_machine_does_is_found() -> None:
    assert "no machine is as fast" in str(judge(heard(7 / FASTEST)))
    assert judge(heard(0.5, count=0)) == "an answer without a token"
    assert judge(heard(0.5, attempt=2)) == "it was not answered at the first attempt"
    assert judge(heard(0.5, kind="expired", end=None, facts={"which": "run"})) == "it expired: run"
    assert judge(heard(0.5, kind="failed", end=None, facts={"code": "oom", "message": "no room"})) == "it failed: no room"
