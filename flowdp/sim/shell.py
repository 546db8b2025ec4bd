"""A worker's shell on virtual time: what it is at, and what it has done since its last report."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from flowdp.machine.worker import Done, Step, WorkerMachine
from flowdp.policy.tally import Work, pace_ms
from flowdp.protocol.messages import Order, StartEpoch

__all__ = ["Shell"]


@dataclass
class Shell:
    """The state of a worker thread around its machine.

    Attributes:
        machine: Decides.
        inbox: Orders that it has not read.
        state: idle, waiting (for its batch), step, gate, busy, serving (a task), released (from an aborted
            gate), gone.
        steps: Since its last report.
        samples: Of these steps.
        entered_ms: When it last entered the gate.
        asked_ms: When it began to wait for its batch; None: it does not.
        wait_ms: Its waiting in the gate since its last acknowledgment.
        acts: How often it did what a crash may hit.
        unread: (epoch, batch) of the step with NaN or inf values before the last mean, while only the device
            knows.
    """

    machine: WorkerMachine
    inbox: deque[Order] = field(default_factory=deque)
    state: str = "starting"
    steps: int = 0
    samples: int = 0
    entered_ms: float = 0.0
    asked_ms: float | None = None
    wait_ms: float = 0.0
    acts: Counter[str] = field(default_factory=Counter)
    unread: tuple[int, int] | None = None
    _expected: deque[int] = field(default_factory=deque)  # plans of the orders to train that are on their way
    _waited_ms: float = 0.0  # for the batch of the next step
    _busy_ms: float = 0.0
    _data_ms: float = 0.0
    _longest_ms: float = 0.0
    _bad: tuple[int, int] | None = None  # the step with NaN or inf values
    _fresh: tuple[int, int] | None = None  # the same, of the round under way, where only the device knows

    @property
    def stirs(self) -> str:
        """Activity of a rank that is not idle; "" if it is idle."""
        if self.state == "gone":
            return ""
        if self.state != "idle":
            return f"is at {self.state}"
        # Orders of void plans are dropped where they arrive.
        is_told = any(plan >= self.machine._oldest_plan for plan in self._expected)
        return "has an order" if is_told or self.machine.order is not None else ""

    def expect(self, order: Order) -> None:
        """An order is on its way."""
        if isinstance(order, StartEpoch):
            self._expected.append(order.plan)

    def receive(self, order: Order) -> None:
        """An order has come."""
        if isinstance(order, StartEpoch):
            self._expected.popleft()
        self.inbox.append(order)

    def wake(self, now_ms: float) -> None:
        """Stop waiting, and let the machine take the orders."""
        if self.asked_ms is not None:
            self._waited_ms += now_ms - self.asked_ms
            self.asked_ms = None
        while self.inbox:
            self.machine.handle(self.inbox.popleft())

    def goes_bad(self, step: Step) -> None:
        """The replica leaves the numbers in this step."""
        at = step.epoch, step.batches[0]
        if self.machine.is_late:
            self._fresh = self._fresh or at
            return
        self.machine.is_bad = True
        self._bad = self._bad or at

    def read(self) -> None:
        """Hear of the verdict on the round before."""
        if self.unread is not None:
            self._bad, self.unread = self._bad or self.unread, None
            self.machine.was_bad, self.machine.is_late = True, False

    def met(self) -> None:
        """A round was held."""
        self.unread, self._fresh = self._fresh, None

    def stepped(self, samples: int, ms: float) -> None:
        """A step is done."""
        self.machine.trained(samples)
        self._busy_ms += ms
        self._data_ms += self._waited_ms
        self._longest_ms = max(self._longest_ms, ms + self._waited_ms)
        self._waited_ms = 0.0
        self.steps += 1
        self.samples += samples

    def work(self, done: Done) -> Work:
        """Everything since the last report as a record; counting starts again."""
        work = Work(
            done.epoch,
            done.steps,
            self.samples,
            busy_ms=self._busy_ms,
            data_ms=self._data_ms,
            pace_ms=pace_ms(self._busy_ms + self._data_ms, self._longest_ms, self.steps),
            losses=(1.0 * self.samples, self.samples),
            bad=self._bad,
        )
        self._busy_ms, self._data_ms, self._longest_ms, self.steps, self.samples = 0.0, 0.0, 0.0, 0, 0
        self._bad = None
        return work
