"""A rank with faults: it crashes, waits for data, and its replica gets NaN or inf values."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from flowdp.machine.worker import Done, Step
from flowdp.policy.tally import Work
from flowdp.protocol.messages import Order, StartEpoch
from flowdp.sim.world import VirtualRank

__all__ = ["FaultyRank"]


@dataclass
class FaultyRank(VirtualRank):
    """The state of a worker thread to which everything may happen.

    Attributes:
        state: Also waiting (for its batch), serving (a task), settling (a mean), released (from an aborted
            gate).
        asked_ms: When it began to wait for its batch; None: it does not.
        acts: How often it did what a crash may hit.
        unread: (epoch, batch) of the step with NaN or inf values before the last mean, while only the device
            knows.
        heals: Whether a bad replica copies a healthy one; not where gradients are averaged.
        is_late: The device leaves a bad replica out of a mean by itself; its host hears of it behind that.
    """

    asked_ms: float | None = None
    acts: Counter[str] = field(default_factory=Counter)
    unread: tuple[int, int] | None = None
    heals: bool = True
    is_late: bool = False
    _expected: deque[int] = field(default_factory=deque)  # plans of the orders to train that are on their way
    _bad: tuple[int, int] | None = None  # the step with NaN or inf values
    _fresh: tuple[int, int] | None = None  # the same, of the round under way, where only the device knows

    @property
    def is_listening(self) -> bool:
        """Whether an order that comes is read at once."""
        return self.state in ("idle", "waiting")

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

    def wake(self, now_ms: float) -> None:
        """Stop waiting for a batch."""
        if self.asked_ms is not None:
            self.data_wait_ms += now_ms - self.asked_ms
            self.asked_ms = None

    def hears_late(self, step: Step) -> bool:
        """Whether its host hears of NaN or inf values in this step behind the mean."""
        return self.is_late and (step.part is None or step.part.by_all)

    def goes_bad(self, step: Step) -> None:
        """The replica gets NaN or inf values in this step."""
        at = step.epoch, step.batches[0]
        if self.hears_late(step):
            self._fresh = self._fresh or at
            return
        self.machine.is_bad = True
        self._bad = self._bad or at

    def read(self) -> None:
        """Hear of the verdict on the round before."""
        if self.unread is not None:
            self._bad, self.unread = self._bad or self.unread, None
            self.machine.is_bad |= self.heals

    def met(self) -> None:
        """A round was held."""
        self.unread, self._fresh = self._fresh, None

    def work(self, done: Done) -> Work:
        """Everything since the last report as a record; counting starts again."""
        work = super().work(done)
        if self._bad is not None:
            work, self._bad = replace(work, bad=self._bad), None
        return work
