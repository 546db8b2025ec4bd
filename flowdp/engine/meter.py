"""Step times and sums of losses of a rank, by the host's clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

from torch import Tensor

from flowdp.collective.base import Averaging, Reading
from flowdp.device.streams import Event
from flowdp.machine.worker import Done, Step
from flowdp.policy.efficiency import Activity
from flowdp.policy.tally import NO_NORMS, pace_ms
from flowdp.protocol.messages import Work
from flowdp.timeline.spans import RankSpans

__all__ = ["Meter", "OrderSums"]


@dataclass(slots=True)
class OrderSums:
    """Sums of an order so far.

    Attributes:
        wait_ms: Time in the gate waiting for other ranks, all rounds together.
        sync_ms: Time in averaging, all rounds together.
        losses: Samples, or weights that losses name, that `loss` is summed over: of losses that were finite.
        longest_ms: Longest step, with its wait for data.
        averaging: Timing of the last round's mean; None without one.
        norms: See `Work.norms`.
    """

    steps: int = 0
    samples: int = 0
    busy_ms: float = 0.0
    data_ms: float = 0.0
    wait_ms: float = 0.0
    sync_ms: float = 0.0
    longest_ms: float = 0.0
    loss: float = 0.0
    losses: float = 0
    scalars: dict[str, list[float]] = field(default_factory=dict)
    averaging: Averaging | None = None
    norms: tuple[float, float, int] = NO_NORMS

    def norm(self, value: float) -> None:
        """Count the norm of a step's gradients; one that is not finite is a scaled loss that overflowed."""
        if isfinite(value):
            total, largest, count = self.norms
            self.norms = total + value, max(largest, value), count + 1

    def scalar(self, name: str, total: float, weight: float) -> None:
        """Add to a weighted sum."""
        sums = self.scalars.setdefault(name, [0.0, 0.0])
        sums[0] += total
        sums[1] += weight

    def work(self, done: Done, lr: float, group_lrs: Mapping[str, float]) -> Work:
        """The order's work, for its report, with the learning rates of its last step."""
        return Work(
            epoch=done.epoch,
            steps=done.steps,
            samples=self.samples,
            busy_ms=self.busy_ms,
            data_ms=self.data_ms,
            pace_ms=pace_ms(self.busy_ms + self.data_ms, self.longest_ms, self.steps),
            losses=(self.loss, self.losses),
            scalars={name: (total, weight) for name, (total, weight) in self.scalars.items()},
            lr=lr,
            norms=self.norms,
            group_lrs=group_lrs,
            wait_ms=self.wait_ms,
            sync_ms=self.sync_ms,
        )


class Meter:
    """Meter of one rank; this one is of a rank whose work is done when the call returns (see `DeviceMeter`).

    Every step is `begin`, then `end`; every round `meet`, then `met`; every order ends with `close`.

    Args:
        spans: Recorder of the rank's spans; None: the run has no timeline.

    Attributes:
        round: Counts the means of the rank; the next step is of this one.
        bad: Round -> its first step whose loss was found not to be finite, until a caller removes it.
        step_ms: Time of the last step without its wait for data; 0 where only the device knows.

    Threads:
        The worker's own.
    """

    def __init__(self, spans: RankSpans | None = None) -> None:
        self._sums = OrderSums()
        self._open: list[tuple[str, float, float]] = []  # values recorded in the current step
        self._spans = spans
        self._start_s = 0.0
        self._waited_s = 0.0
        self.round = 0
        self.bad: dict[int, Step] = {}
        self.step_ms = 0.0

    def begin(self, start_s: float) -> None:
        """Begin a step, whose batch is there and which is about to be put on the device.

        Args:
            start_s: When the host began to get the batch, by `perf_counter`.
        """
        self._start_s = start_s
        if self._open:
            self._count_recorded()

    def end(
        self,
        loss: Tensor | None,
        samples: int,
        step: Step,
        norms: Sequence[Tensor] = (),
        weight: Tensor | None = None,
    ) -> None:
        """End a step: it is on the device.

        Args:
            loss: Mean over its samples, or by their weights, detached. Shape []. None where it has none.
            samples: How many.
            step: The step.
            norms: 2-norms of its gradients, where they were clipped. Shape [] each.
            weight: Weight of the loss, the mean over its samples; None where it counts by samples. Shape [].
        """
        sums = self._sums
        for norm in norms:
            sums.norm(norm.item())
        if loss is not None:
            value = loss.item()
            if isfinite(value):
                counted = samples if weight is None else weight.item() * samples
                sums.loss += value * counted
                sums.losses += counted
            else:
                self.bad.setdefault(self.round, step)
        if self._open:
            self._count_recorded()
        sums.samples += samples
        sums.steps += 1
        now_s = perf_counter()
        spent_ms = self.step_ms = (now_s - self._start_s) * 1e3
        sums.busy_ms += spent_ms
        if self._spans is not None:
            self._spans.add(Activity.STEP, self._start_s, now_s)
        if self._waited_s:
            sums.data_ms += self._waited_s * 1e3
            spent_ms += self._waited_s * 1e3
            self._waited_s = 0.0
        if spent_ms > sums.longest_ms:
            sums.longest_ms = spent_ms

    def discard(self) -> None:
        """Drop all values recorded since `begin`: the step begins again."""
        self._open.clear()

    def waited(self, seconds: float) -> None:
        """Count the time that the host waited for the batch of the next step."""
        self._waited_s += seconds
        self._start_s += seconds  # of a step that is under way, which was not busy then
        if self._spans is not None:
            now_s = perf_counter()
            self._spans.add(Activity.DATA, now_s - seconds, now_s)

    def scalar(self, name: str, value: float | Tensor, weight: float) -> None:
        """Count a number towards a mean."""
        if not weight:
            value = 0.0  # a mean over nothing, NaN as a rule: times 0 it would stay so
        number = value.item() if isinstance(value, Tensor) else value
        self._open.append((name, number * weight, weight))

    def send(self) -> None:
        """Let the losses of all steps so far come to the host behind them."""

    def wait_for(self, event: Event) -> None:
        """Wait until the device has passed a mark that the host runs ahead of."""
        event.synchronize()

    def look(self) -> None:
        """Wait for the losses of all steps so far, and see whether they are finite."""

    def losses(self) -> Tensor | None:
        """Number on a device that is finite if all losses since the last call are; None without losses.

        Float64, shape [].
        """
        return None

    def meet(self) -> None:
        """Begin the wait at the gate."""
        self._start_s = perf_counter()

    def met(self, reading: Reading) -> None:
        """Note that the round's mean is on its way: whatever was not averaging was waiting for other ranks.

        Args:
            reading: Its timing and results.
        """
        sums = self._sums
        averaging = sums.averaging = reading()
        now_s = perf_counter()
        wait_ms = max(0.0, (now_s - self._start_s) * 1e3 - averaging.sync_ms)
        sums.wait_ms += wait_ms
        sums.sync_ms += averaging.sync_ms
        if self._spans is not None:
            self._spans.meeting(self._start_s, self._start_s + wait_ms / 1e3, now_s)
        self._start_s = now_s

    def stepped(self, norms: Sequence[Tensor] = ()) -> None:
        """Count the step behind the mean, which is on the device, as work (exact).

        Args:
            norms: See `end`.
        """
        for norm in norms:
            self._sums.norm(norm.item())
        now_s = perf_counter()
        self._sums.busy_ms += (now_s - self._start_s) * 1e3
        if self._spans is not None:
            self._spans.add(Activity.STEP, self._start_s, now_s, count=0)

    def averaged(self, start_s: float) -> None:
        """Count the time since the last step as averaging: a snapshot was taken, or a mean applied (async).

        Args:
            start_s: When the host began with it, by `perf_counter`.
        """
        now_s = perf_counter()
        self._sums.sync_ms += (now_s - start_s) * 1e3
        if self._spans is not None:
            self._spans.add(Activity.AVERAGE, start_s, now_s)

    def close(self, post: Callable[[OrderSums], None]) -> None:
        """Close an order; the next step belongs to another.

        Args:
            post: Called with the order's sums, at once or in a later call of this meter.
        """
        self._count_recorded()
        sums, self._sums = self._sums, OrderSums()
        post(sums)

    def then(self, post: Callable[[], None]) -> None:
        """Call `post` once all earlier events were reported: events are posted in the order of occurrence."""
        post()

    def settle(self) -> None:
        """Wait for the device and report what is due, before the thread waits for a message.

        Call again after blocking, so that the wait is charged to no step.
        """

    def _count_recorded(self) -> None:
        for name, total, weight in self._open:
            self._sums.scalar(name, total, weight)
        self._open.clear()
