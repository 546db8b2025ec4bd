"""A worker's shell on virtual time: what it is at, and what it has done since its last report."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from flowdp.machine.worker import Done, WorkerMachine
from flowdp.messages import Order
from flowdp.policy.tally import Work, pace_ms
from flowdp.sim.rules import Violation

__all__ = ["Shell"]


@dataclass
class Shell:
    """What surrounds a worker's machine.

    Attributes:
        machine: Decides.
        inbox: Orders that it has not read.
        state: idle, waiting (for its batch), step, gate, busy, released (from an aborted gate), gone.
        entered_ms: When it last entered the gate.
        asked_ms: When it began to wait for its batch; None: it does not.
        wait_ms: Its waiting in the gate since its last acknowledgment.
        acts: How often it did what a crash may hit.
    """

    machine: WorkerMachine
    inbox: deque[Order] = field(default_factory=deque)
    state: str = "starting"
    entered_ms: float = 0.0
    asked_ms: float | None = None
    wait_ms: float = 0.0
    acts: Counter[str] = field(default_factory=Counter)
    _waited_ms: float = 0.0  # for the batch of the next step
    _busy_ms: float = 0.0
    _data_ms: float = 0.0
    _longest_ms: float = 0.0
    _steps: int = 0
    _samples: int = 0

    def wake(self, now_ms: float) -> None:
        """Stop waiting, and let the machine take the orders."""
        if self.asked_ms is not None:
            self._waited_ms += now_ms - self.asked_ms
            self.asked_ms = None
        while self.inbox:
            self.machine.handle(self.inbox.popleft())

    def stepped(self, samples: int, ms: float) -> None:
        """A step is done."""
        self.machine.trained(samples)
        self._busy_ms += ms
        self._data_ms += self._waited_ms
        self._longest_ms = max(self._longest_ms, ms + self._waited_ms)
        self._waited_ms = 0.0
        self._steps += 1
        self._samples += samples

    def work(self, done: Done) -> Work:
        """Everything since the last report as a record; counting starts again."""
        if self._steps != done.steps:
            raise Violation("S4", f"rank {self.machine.rank} took {self._steps} steps for {done}")
        work = Work(
            done.epoch,
            done.steps,
            self._samples,
            busy_ms=self._busy_ms,
            data_ms=self._data_ms,
            pace_ms=pace_ms(self._busy_ms + self._data_ms, self._longest_ms, self._steps),
            losses=(1.0 * self._samples, self._samples),
        )
        self._busy_ms, self._data_ms, self._longest_ms, self._steps, self._samples = 0.0, 0.0, 0.0, 0, 0
        return work
