"""Step times, sums of losses, and activity of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import Averaging, Reading
from flowdp.device.streams import Lane
from flowdp.engine.clocks import PAGE, STEPS_AHEAD, DeviceClock, HostClock, Kind, Mark
from flowdp.machine.worker import Done, Step
from flowdp.policy.efficiency import Activity, RankTimes
from flowdp.policy.tally import NO_NORMS, pace_ms
from flowdp.policy.worth import LaunchWatch
from flowdp.protocol.messages import StartEpoch, Work
from flowdp.timeline.spans import RankSpans

__all__ = ["Meter", "OrderSums", "RankActivity"]


@dataclass(slots=True)
class OrderSums:
    """Sums of an order so far.

    Attributes:
        wait_ms: Time in the gate waiting for other ranks, all rounds together.
        sync_ms: Time in averaging, all rounds together.
        losses: Samples, or weights that losses name, that `loss` is summed over: of losses that were finite.
        longest_ms: Longest step, with its wait for data.
        scalars: Weighted sum and sum of weights of each recorded number.
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
    scalars: dict[str, tuple[float, float]] = field(default_factory=dict)
    averaging: Averaging | None = None
    norms: tuple[float, float, int] = NO_NORMS

    @property
    def wait(self) -> Activity:
        """The name of its waits at the gate."""
        return Activity.GATE if self.samples else Activity.LEFT_OUT

    def norm(self, value: float) -> None:
        """Count the norm of a step's gradients; one that is not finite is a scaled loss that overflowed."""
        if isfinite(value):
            total, largest, count = self.norms
            self.norms = total + value, max(largest, value), count + 1

    def scalar(self, name: str, weight: float, total: float) -> None:
        """Take a weighted sum of the order, with the sum of its weights."""
        self.scalars[name] = total, weight

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
            scalars=self.scalars,
            lr=lr,
            norms=self.norms,
            group_lrs=group_lrs,
            wait_ms=self.wait_ms,
            sync_ms=self.sync_ms,
        )


class Meter:
    """Meter of one rank.

    Every step is `begin`, then `end`; every round `meet`, then `met`; every order ends with `close`.

    Args:
        lane: Lane of the rank; its compute stream is current at each call.
        watch: Takes the times of its steps, to decide whether they are captured; None: that is decided.
        spans: Recorder of the rank's spans; None: the run has no timeline.

    Attributes:
        round: Counts the means of the rank; the next step is of this one.
        bad: Round -> its first step whose loss was found not to be finite, until a caller removes it.
        step_ms: Time of the last step that has landed, without its wait for data.

    Threads:
        The worker's own.
    """

    def __init__(self, lane: Lane, watch: LaunchWatch | None = None, spans: RankSpans | None = None) -> None:
        self._lane, self._watch, self._spans = lane, watch, spans
        self._clock = DeviceClock(lane) if lane.is_async else HostClock()
        self._sums = OrderSums()
        self._scalars: dict[str, tuple[float | Tensor, float]] = {}  # weighted sums of the order, and weights
        self._saved: dict[str, tuple[float | Tensor, float]] = {}  # when the step under way began
        self._unseen: list[Tensor] = []  # losses on a device, since the last call of `losses`
        self._begin = self._last = self._clock.mark()  # of the step under way; where the last work ended
        self._launch_s = 0.0  # when the step under way began, by the host's clock
        self.round = 0
        self.bad: dict[int, Step] = {}
        self.step_ms = 0.0

    def begin(self, start_s: float) -> None:
        """Begin a step, whose batch is there; waits until the device is less than `STEPS_AHEAD` steps behind.

        Args:
            start_s: When the host began to get the batch, by `perf_counter`.
        """
        clock = self._clock
        if clock.is_behind:
            clock.limit(Kind.STEP, STEPS_AHEAD - 1)
            self._launch_s = perf_counter()
        self._begin = clock.begin(start_s)
        if self._scalars or self._saved:
            self._saved = self._scalars.copy()

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
        sums, clock = self._sums, self._clock
        if loss is not None:
            given = sums, samples, step, self.round
            if weight is None:
                copies = clock.read(self._note_loss, given, loss)
            else:
                copies = clock.read(self._note_loss, given, loss, weight)
            if clock.is_behind:
                self._unseen.append(copies[0])
                if len(self._unseen) > PAGE:
                    self._unseen = [torch.stack(self._unseen).sum()]
        for norm in norms:
            clock.read(sums.norm, (), norm)
        sums.samples += samples
        sums.steps += 1
        last, begin, end = self._last, self._begin, clock.mark()
        self._last = end
        launch_ms = 0.0 if self._watch is None else (perf_counter() - self._launch_s) * 1e3
        clock.then(self._land_step, (sums, last, begin, end, launch_ms), Kind.STEP, end, (last, begin))

    def _land_step(self, sums: OrderSums, last: Mark, begin: Mark, end: Mark, launch_ms: float) -> None:
        clock = self._clock
        busy_ms, data_ms = clock.step_ms(last, begin, end)
        self.step_ms = busy_ms
        sums.busy_ms += busy_ms
        sums.data_ms += data_ms
        if busy_ms + data_ms > sums.longest_ms:
            sums.longest_ms = busy_ms + data_ms
        if self._spans is not None:
            if clock.is_behind:
                self._record(begin, (Activity.DATA, data_ms, 1))
            self._record(end, (Activity.STEP, busy_ms, 1))
        if self._watch is not None:
            self._watch.take(launch_ms, busy_ms)

    def discard(self) -> None:
        """Drop all values recorded since `begin`: the step begins again."""
        self._scalars = self._saved.copy()

    def waited(self, seconds: float) -> None:
        """Count the time that the host waited for the batch of the next step."""
        self._clock.waited(seconds)
        if self._spans is not None and not self._clock.is_behind:
            now_s = perf_counter()
            self._spans.add(Activity.DATA, now_s - seconds, now_s)

    def scalar(self, name: str, value: float | Tensor, weight: float) -> None:
        """Count a number towards a mean; a tensor of a device that runs behind its host stays there."""
        total, weights = self._scalars.get(name, (0.0, 0.0))
        if not weight:
            pass  # a mean over nothing, NaN as a rule: times 0 it would stay so
        elif not isinstance(value, Tensor):
            total = total + value * weight
        elif not self._clock.is_behind or value.device != self._lane.device:
            total = total + value.item() * weight
        elif isinstance(total, Tensor):
            total = torch.add(total, value.detach().reshape(()), alpha=weight)
        else:
            total = value.detach().reshape(()).to(torch.float64) * weight + total
        self._scalars[name] = total, weights + weight

    def send(self) -> None:
        """Let the losses of all steps so far come to the host behind them."""
        self._clock.send()

    def look(self) -> None:
        """Wait for the losses of all steps so far, and see whether they are finite."""
        self._clock.send()
        self.settle()

    def losses(self) -> Tensor | None:
        """Number on a device that is finite if all losses since the last call are; None without losses.

        Float64, shape [].
        """
        unseen, self._unseen = self._unseen, []
        if len(unseen) > 1:
            return torch.stack(unseen).sum()
        return unseen[0] if unseen else None

    def meet(self) -> None:
        """Begin the wait at the gate; rounds without steps are bounded as steps are.

        The wait for other ranks may be long, and planning stops while a report is missing: one that no step
        of this round has brought, because it had so few, is fetched. Its steps go on on the device meanwhile.
        """
        self._clock.limit(Kind.FACT, 0)
        self._clock.limit(Kind.ROUND, STEPS_AHEAD - 1)
        self._last = self._clock.since(self._last, perf_counter())

    def met(self, reading: Reading) -> None:
        """Note that the round's mean is on its way: whatever was not averaging was waiting for other ranks.

        The mark lies behind the compute stream's wait for the mean.

        Args:
            reading: Its timing and results.
        """
        sums, clock, last, resumed = self._sums, self._clock, self._last, self._clock.mark()
        self._last = resumed

        def land() -> None:
            averaging = sums.averaging = reading()
            wait_ms = max(0.0, clock.ms(last, resumed) - averaging.sync_ms)
            sums.wait_ms += wait_ms
            sums.sync_ms += averaging.sync_ms
            self._record(resumed, (sums.wait, wait_ms, 1), (Activity.AVERAGE, averaging.sync_ms, 1))

        clock.then(land, (), Kind.ROUND, resumed, (last,))

    def end_round(self, awaited: int | None) -> None:
        """Begin the next round, and forget the bad losses of those before.

        Args:
            awaited: An earlier round, of which the verdict is still to be read; None: there is none.
        """
        self.round += 1
        if self.bad:
            first = self.round if awaited is None else awaited
            self.bad = {number: step for number, step in self.bad.items() if number >= first}

    def stepped(self, norms: Sequence[Tensor] = ()) -> None:
        """Count the step behind the mean, which is on the device, as work (exact).

        Args:
            norms: See `end`.
        """
        sums, clock, last = self._sums, self._clock, self._last
        for norm in norms:
            clock.read(sums.norm, (), norm)
        end = self._last = clock.mark()

        def land() -> None:
            busy_ms = clock.ms(last, end)
            sums.busy_ms += busy_ms
            self._record(end, (Activity.STEP, busy_ms, 0))

        clock.then(land, (), Kind.OTHER, end, (last,))

    def averaged(self, start_s: float) -> None:
        """Count the time since the last step as averaging: a snapshot was taken, or a mean applied (async).

        Args:
            start_s: When the host began with it, by `perf_counter`.
        """
        sums, clock, last = self._sums, self._clock, self._last
        start, end = clock.since(last, start_s), clock.mark()
        self._last = end

        def land() -> None:
            sync_ms = clock.ms(start, end)
            sums.sync_ms += sync_ms
            self._record(end, (Activity.AVERAGE, sync_ms, 1))

        clock.then(land, (), Kind.OTHER, end, (last,))

    def close(self, post: Callable[[OrderSums], None]) -> None:
        """Close an order; the next step belongs to another.

        Args:
            post: Called with the order's sums when the device has passed its last step: at once, or in a
                later call of this meter.
        """
        sums, self._sums = self._sums, OrderSums()
        scalars, self._scalars = self._scalars, {}
        for name, (total, weight) in scalars.items():
            if isinstance(total, Tensor):
                self._clock.read(sums.scalar, (name, weight), total)
            else:
                sums.scalar(name, weight, total)
        self._clock.send()
        self.then(lambda: post(sums))

    def then(self, post: Callable[[], None]) -> None:
        """Call `post` once all earlier events were reported: events are posted in the order of occurrence."""
        here = self._clock.mark()
        self._clock.then(post, (), Kind.FACT, here, (here,))

    def settle(self) -> None:
        """Wait for the device and report what is due, before the thread waits for a message.

        Call again after blocking, so that the wait is charged to no step.
        """
        self._last = self._clock.settle(self._last)

    def _note_loss(
        self,
        sums: OrderSums,
        samples: int,
        step: Step,
        round: int,
        loss: float,
        weight: float = 1,
    ) -> None:
        """Count a loss; `weight`: per sample, if it names one."""
        if isfinite(loss):
            sums.loss += loss * weight * samples
            sums.losses += weight * samples
        else:
            self.bad.setdefault(round, step)

    def _record(self, end: Mark, *parts: tuple[Activity, float, int]) -> None:
        """Record spans that follow each other up to a mark: use, milliseconds, and what they count for."""
        if self._spans is None:
            return
        start_s = self._clock.start_s(sum(ms for _, ms, _ in parts), end)
        for activity, ms, count in parts:
            end_s = start_s + ms / 1e3
            if ms > 0.0:
                self._spans.add(activity, start_s, end_s, count)
            start_s = end_s


class RankActivity:
    """Activity of a rank.

    Args:
        spans: Recorder of its spans; None: the run has no timeline.

    Attributes:
        moves: Counts up with all that is no step: meetings, batches evaluated, barrier tasks done.
        longest_ms: The longest step in the orders that have ended.
        awaited: (epoch, batch) that it waits for; None: for none.
        task: Its barrier task, as text; "" while it has none.
        is_idle: It waits for orders.
        is_bound: The other ranks wait for it.
        has_left: Its thread is at its end.

    Threads:
        Written by the rank's worker, read by any.
    """

    def __init__(self, spans: RankSpans | None) -> None:
        self.moves = 0
        self.longest_ms = 0.0
        self.awaited: tuple[int, int] | None = None
        self.task = ""
        self.is_idle = False
        self.is_bound = False
        self.has_left = False
        self._spans = spans
        self._times = RankTimes()
        self._begun_s = self._left_s = 0.0

    def begin(self) -> None:
        """Note that the thread begins."""
        self._begun_s = perf_counter()

    def leave(self) -> None:
        """Note that the thread is at its end."""
        self.has_left, self._left_s = True, perf_counter()

    def moved(self) -> None:
        """Note that it has done something that is no step."""
        self.moves += 1

    def spent(self, activity: Activity, start_s: float) -> None:
        """Count the time since then, which belongs to no step and no round."""
        now_s = perf_counter()
        self._times.add(activity, (now_s - start_s) * 1e3)
        if self._spans is not None:
            self._spans.add(activity, start_s, now_s)

    def count(self, sums: OrderSums, order: StartEpoch | None = None) -> None:
        """Count the steps and rounds of an order, or of a part of it that no round ends (None)."""
        self.longest_ms = max(self.longest_ms, sums.longest_ms)
        times = self._times
        times.add(Activity.STEP, sums.busy_ms)
        times.add(Activity.DATA, sums.data_ms)
        planned_ms = 0.0 if order is None else min(sums.wait_ms, order.slack_ms)
        if order is not None and planned_ms:
            times.add(Activity.GUARD if order.guarded else Activity.ROUNDING, planned_ms)
        times.add(sums.wait, sums.wait_ms - planned_ms)
        times.add(Activity.AVERAGE, sums.sync_ms)
        times.steps += sums.steps
        times.samples += sums.samples

    def times(self) -> RankTimes:
        """A copy of its times; any thread may ask."""
        times, end_s = self._times, self._left_s or perf_counter()
        return RankTimes(
            dict(times.ms),
            times.samples,
            times.steps,
            wall_ms=(end_s - self._begun_s) * 1e3 if self._begun_s else 0.0,
        )
