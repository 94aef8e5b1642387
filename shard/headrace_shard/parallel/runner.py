"""The two ends of a step: the leader hands it to all ranks and runs it, followers run what they are handed."""

from __future__ import annotations

import logging
import threading
import time

import torch

from headrace_shard.models.base import Model
from headrace_shard.parallel import descriptor
from headrace_shard.parallel.group import Group, GroupBroken, Trouble, first_line
from headrace_shard.step import StepInput

log = logging.getLogger(__name__)


class Leader:
    """The model of a group, as the executor sees it."""

    IDLE_SECONDS = 1.0  # a group that has nothing to do exchanges an empty step this often

    def __init__(self, model: Model, group: Group) -> None:
        self._model, self._group = model, group
        self.heartbeat = self.IDLE_SECONDS if group.world_size > 1 else None

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [logit rows, vocab], float32, until the next step.

        Raises:
            GroupBroken: a rank did not do its part. With several ranks every failure is one: they are out of step.
        """
        if self._group.world_size == 1:
            return self._model.forward(step)
        self._group.send(descriptor.encode(step))
        try:
            return self._model.forward(step)
        except RuntimeError as error:
            raise GroupBroken(f"rank 0 failed in a step: {first_line(error)}", lost=False) from error

    def idle(self) -> None:
        """Tell the followers that the leader lives, and learn that they do.

        Raises:
            GroupBroken: one does not answer.
        """
        self._group.send(descriptor.note(descriptor.IDLE))
        self._group.sum(torch.zeros(1))

    def stop(self) -> None:
        """Tell the followers to end."""
        self._group.send(descriptor.note(descriptor.STOP))


class Follower:
    """The loop of a rank other than 0, on a thread of its own."""

    def __init__(self, model: Model, group: Group, step_deadline: float) -> None:
        self._model, self._group, self._step_deadline = model, group, step_deadline
        self._busy_since = 0.0
        self._trouble: Trouble | None = None
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def trouble(self) -> Trouble | None:
        """Why this rank is not healthy, or None."""
        if self._trouble or not self._thread.is_alive():
            return self._trouble or Trouble("the leader has ended the group", "lost")
        seconds = time.monotonic() - self._busy_since if self._busy_since else 0.0
        if seconds > self._step_deadline:
            return Trouble(f"rank {self._group.rank} is in one step for {seconds:.0f} s", "hung")
        return None

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._one():
                    pass
        except GroupBroken as error:
            self._trouble = Trouble(str(error), "lost")
        except RuntimeError as error:  # torch's own: out of memory, a shape that does not fit
            log.exception("a step failed")
            self._trouble = Trouble(f"rank {self._group.rank} failed in a step: {first_line(error)}", "failed")

    def _one(self) -> bool:
        """Run what the leader sends next; False when it has said that this was all."""
        values = self._group.receive()
        kind = int(values[0])
        if kind == descriptor.IDLE:
            self._group.sum(torch.zeros(1))
        elif kind == descriptor.STEP:
            self._busy_since = time.monotonic()
            self._model.forward(descriptor.decode(values))
            self._busy_since = 0.0
        return kind != descriptor.STOP
