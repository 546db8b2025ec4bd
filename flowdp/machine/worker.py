"""The worker's machine: a queue of plans and one rule (next step, enter the gate, idle, leave).

The shell asks `next()` between any two steps, takes that action, and reports back with `trained()` or
`met()`. Nothing here waits, and nothing here computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from flowdp.errors import ProtocolError
from flowdp.policy import schedule
from flowdp.protocol.messages import (
    Abort,
    Arrival,
    BarrierTask,
    CopyReplica,
    DataEnded,
    Evaluate,
    Order,
    Outcome,
    RequestParams,
    SampleRange,
    SaveState,
    Settle,
    Shutdown,
    StartEpoch,
    SyncNow,
    SyncPoints,
    Throttle,
    Update,
    Window,
)

__all__ = [
    "Action",
    "Apply",
    "Done",
    "Idle",
    "Leave",
    "Snapshot",
    "Step",
    "WorkerMachine",
]


@dataclass(slots=True)
class Step:
    """Train these batches in one step.

    Attributes:
        epoch: Their epoch.
        batches: Their numbers in the epoch: one, or up to the order's `group`.
        position: Where the step stands in the run, in steps of all ranks: the scheduler's clock.
        metrics: Losses of the epochs before; see `StartEpoch`.
        part: The samples of its one batch that are this rank's, at least one; the optimizer steps after the
            meeting that follows (exact). None: whole batches.
        alone: The part is the whole batch, and the optimizer steps at once: others take over the replica.
    """

    epoch: int
    batches: tuple[int, ...]
    position: int
    metrics: tuple[float | None, ...] = ()
    part: SampleRange | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """An order has ended, or a part of it.

    Attributes:
        plan: Its plan.
        epoch: Epoch of its batches.
        steps: Steps that were taken with them, since the last report.
        is_last: The order has ended; False where the rest of it follows.
    """

    plan: int
    epoch: int
    steps: int
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the replica for this round and say so with `steps` and `samples` (async)."""

    round: int
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring the round's mean into the replica; `steps` were taken since its snapshot (async)."""

    round: int
    steps: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Wait at the inbox."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the thread.

    Attributes:
        reason: None at the end of the run, else whose failure.
    """

    reason: str | None


Action = Step | Arrival | Done | Snapshot | Apply | BarrierTask | Idle | Leave
"""Next action of a rank. `Arrival`: enter the gate with it, then call `met` with the outcome. `Done`: report
its work (async). A barrier task: do it."""

_IDLE = Idle()


class WorkerMachine:
    """Chooses the next action of one rank.

    Args:
        rank: Rank index.
        global_step: Steps of all ranks before the run began: of the one that it continues.

    Attributes:
        steps: Steps since the last mean.
        samples: Samples of those steps.
        total_steps: Steps of the run.
        unreported_samples: Samples already averaged into the model, not yet acknowledged.
        is_bad: The replica has NaN or inf parameters, or its device left it out of the last mean for them, as
            the host has heard since: it weighs nothing at the gate until one of all ranks has told of it.
        plans: Counts up whenever `upcoming` is another list than before, but for batches trained since.
    """

    def __init__(self, rank: int, global_step: int = 0) -> None:
        self.rank = rank
        self.steps = 0
        self.samples = 0
        self.total_steps = 0
        self.unreported_samples = 0
        self.is_bad = False
        self.plans = 0
        self._tasks: deque[BarrierTask] = deque()
        self._orders: deque[StartEpoch] = deque()
        self._control: deque[RequestParams | Update] = deque()
        self._order: StartEpoch | None = None
        self._done = 0  # steps of the current order
        self._taken = 0  # and its batches that were in them
        self._in_round = 0  # steps of the round that it is in
        self._held = 0  # rounds of the order that were held
        self._base = global_step  # steps of all ranks at the last mean
        self._next_round = 0  # no round before this one will ask for us
        self._sync_now = -1  # rounds up to this one are entered with the steps there are
        self._oldest_plan = 0  # orders of older plans are void
        self._snapshot: Snapshot | None = None
        self._reported = 0  # steps of the current order that were reported
        self._throttle: Throttle | None = None
        self._cut: Done | None = None  # the order that a hurried blocking round cut short (async)
        self._cut_steps = 0  # and how many steps were not taken for its sake
        self._leave: Leave | None = None

    @property
    def order(self) -> StartEpoch | None:
        """The order under way."""
        return self._order

    @property
    def window(self) -> Step | None:
        """The step of all ranks at whose gate it is, whether it has a part of it or not (exact)."""
        order, at = self._order, self._held
        if order is None or order.sync is None or order.parts is None:
            return None
        position = order.sync.global_step + at * order.sync.steps
        return Step(order.epoch, (order.batches[at],), position, order.metrics, order.parts[at])

    @property
    def throttled(self) -> str | None:
        """Why this rank may take no step; None while it may."""
        throttle = self._throttle
        return None if throttle is None or self.total_steps < throttle.limit else throttle.reason

    @property
    def leaves(self) -> bool:
        """Whether it was told to leave."""
        return self._leave is not None

    def handle(self, order: Order) -> None:
        """Take an order."""
        match order:
            case StartEpoch():
                if order.plan >= self._oldest_plan:
                    self._orders.append(order)
                    self.plans += 1
            case DataEnded():
                self._shorten(order)
            case RequestParams() | Update():
                self._control.append(order)
            case SyncNow():
                self._sync_now = max(self._sync_now, order.round)
            case Throttle():
                self._throttle = order
            case Evaluate() | SaveState() | CopyReplica() | Settle():
                self._tasks.append(order)
            case Shutdown():
                self._leave = self._leave or Leave(None)
            case Abort():
                self._leave = Leave(order.reason)

    def next(self, in_step: bool = False) -> Action:
        """Decide the next action.

        Args:
            in_step: A step has begun and waits for a batch: it is finished, for the batches that it has taken
                cannot be dealt anew.
        """
        if self._leave is not None:
            return self._leave
        if self._control:
            return self._serve(self._control.popleft())
        order = self._order
        if order is None:
            if self._tasks:
                task = self._tasks.popleft()
                if isinstance(task, CopyReplica):
                    self.is_bad = False
                return task
            if not self._orders:
                return _IDLE
            order = self._order = self._orders.popleft()
            self._done = self._taken = self._in_round = self._held = self._reported = 0
        sync = order.sync
        if sync is None:
            return self._next_free(order, in_step=in_step)
        before = sync.global_step + self._held * sync.steps
        # Without a sample in the part there is no step to take, and none is left out.
        is_idle = order.parts is not None and order.parts[self._held].samples == 0
        planned = 0 if is_idle else sync.every
        is_over = self._in_round >= planned or self._taken >= len(order.batches)
        if not is_over and (in_step or self._sync_now < sync.round + self._held):
            return self._step(order, schedule.position(before, self._in_round, sync.steps, planned))
        is_inner = sync.inner and self._held < sync.count - 1
        arrival = Arrival(
            self.rank,
            sync.round + self._held,
            # Of the order, where its rounds may be cut and are counted by the gates.
            sync.global_step if sync.inner else before,
            self.steps,
            self.samples,
            left=self._left(sync, planned, is_inner=is_inner) + self._cut_steps,
            drift=sync.drift and not is_inner,
            inner=is_inner,
            window=self._window(order, sync),
        )
        return self.judged(arrival)

    def judged(self, arrival: Arrival, touched: bytes = b"") -> Arrival:
        """An arrival with all that is known by now of the replica's numbers, and of its gradients."""
        if touched and arrival.window is not None:
            arrival = replace(arrival, window=replace(arrival.window, touched=touched))
        return replace(arrival, bad=True) if self.is_bad else arrival

    def trained(self, samples: int) -> None:
        """The step that `next` named is done."""
        self.steps += 1
        self.total_steps += 1
        self.samples += samples
        self._done += 1
        self._in_round += 1
        self._taken += 1 if self._order is None else self._order.group

    def met(self, outcome: Outcome) -> Done | None:
        """The round is held; an answer says which order ended with it and is to be acknowledged."""
        order = self._order
        if order is None or order.sync is None:
            raise ProtocolError(f"rank {self.rank} got {outcome} without an order")
        self.unreported_samples += self.samples
        self.steps = self.samples = 0
        self.is_bad &= outcome.inner  # which voids nothing, so nobody is healed behind it
        self._snapshot = None
        self._base = outcome.global_step
        self._next_round = outcome.round + 1
        self._in_round = 0
        self._held += 1
        if not outcome.voids and self._held < order.sync.count:
            return None
        self.unreported_samples = 0
        done = self._cut or Done(order.plan, order.epoch, self._done)
        self._order = self._cut = None
        self._cut_steps = 0
        if outcome.voids:
            self._orders.clear()
            self._oldest_plan = order.plan + 1
            self.plans += 1
        return done

    def upcoming(self) -> list[tuple[int, int, SampleRange | None]]:
        """The (epoch, batch, part) that will be trained next, in this order, if no fact changes it."""
        order, gone = self._order, self._taken
        if order is None:
            return [batch for order in self._orders for batch in _wanted(order)]
        if order.parts is not None:
            # Windows without a sample for this rank are behind it, too.
            gone = self._held + self._in_round
        return [*_wanted(order, gone), *(batch for later in self._orders for batch in _wanted(later))]

    def applied(self, round: int, global_step: int) -> None:
        """The mean of the round is in: only the steps behind the snapshot are still this rank's own."""
        if self._snapshot is None or self._snapshot.round != round:
            raise ProtocolError(
                f"rank {self.rank} got the mean of round {round}, its snapshot is {self._snapshot}"
            )
        self.steps -= self._snapshot.steps
        self.samples -= self._snapshot.samples
        self._base = global_step
        self._snapshot = None

    def _window(self, order: StartEpoch, sync: SyncPoints) -> Window | None:
        if order.parts is None:
            return None
        return Window(order.alone, compare=sync.compare and self._held == sync.count - 1)

    def _left(self, sync: SyncPoints, planned: int, *, is_inner: bool) -> int:
        """Steps that the rank was to take and did not: before one of all machines, in all of the order."""
        if sync.inner and not is_inner:
            return sync.count * planned - sync.short - self._done
        return planned - self._in_round

    def _shorten(self, end: DataEnded) -> None:
        """Drop batches beyond the end of an epoch; at the gate they count as left: later orders are void."""
        self._orders = deque(order.until(end) for order in self._orders)
        if self._order is not None:
            self._order = self._order.until(end)
        self.plans += 1

    def _serve(self, order: RequestParams | Update) -> Action:
        if isinstance(order, RequestParams):
            self._snapshot = Snapshot(order.round, self.steps, 0 if self.is_bad else self.samples)
            return self._snapshot
        self.applied(order.round, order.global_step)
        return Apply(order.round, self.steps)

    def _next_free(self, order: StartEpoch, *, in_step: bool) -> Action:
        is_called = self._sync_now >= self._next_round and not in_step
        if is_called and any(later.sync is not None for later in self._orders):
            return self._skip_to_gate(order)
        fresh = self._done - self._reported
        if self._taken < len(order.batches):
            throttle = self._throttle
            is_held = throttle is not None and self.total_steps >= throttle.limit and not in_step
            if fresh and (is_held or fresh == order.report_every):
                self._reported = self._done
                return Done(order.plan, order.epoch, fresh, is_last=False)
            if is_held:
                return _IDLE
            pace = order.pace
            if pace is None:
                return self._step(order, self._base)
            return self._step(order, schedule.position(self._base, self.steps, pace.steps, pace.quota))
        self._order = None
        return Done(order.plan, order.epoch, fresh)

    def _skip_to_gate(self, order: StartEpoch) -> Action:
        """Go to the blocking round in the queue; the orders before it are dealt anew (async)."""
        self._cut = Done(order.plan, order.epoch, self._done - self._reported)
        self._cut_steps = order.steps - self._done
        while self._orders[0].sync is None:
            self._cut_steps += self._orders.popleft().steps
        self.plans += 1
        self._order = self._orders.popleft()
        self._done = self._taken = self._in_round = self._held = self._reported = 0
        return self.next()

    def _step(self, order: StartEpoch, position: int) -> Step:
        if order.parts is not None:
            at = self._held + self._in_round
            window = (order.batches[at],)
            return Step(order.epoch, window, position, order.metrics, order.parts[at], order.alone)
        batches = order.batches[self._taken : self._taken + order.group]
        return Step(order.epoch, batches, position, order.metrics)


def _wanted(order: StartEpoch, gone: int = 0) -> list[tuple[int, int, SampleRange | None]]:
    """Batches of an order that a rank trains, from number `gone` on."""
    if order.parts is None:
        return [(order.epoch, batch, None) for batch in order.batches[gone:]]
    windows = zip(order.batches[gone:], order.parts[gone:], strict=True)
    return [(order.epoch, window, part) for window, part in windows if part.samples]
