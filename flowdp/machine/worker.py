"""The worker's machine: a queue of plans and one rule (next step, enter the gate, idle, leave).

The shell asks `next()` between any two steps, takes that action, and reports back with `trained()` or
`met()`. Nothing here waits, and nothing here computes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flowdp.errors import ProtocolError
from flowdp.policy.schedule import position
from flowdp.protocol.messages import (
    Arrival,
    BarrierTask,
    CopyReplica,
    DataEnded,
    Evaluate,
    Leave,
    Order,
    Outcome,
    RequestParams,
    SampleRange,
    SaveState,
    Settle,
    StartEpoch,
    SyncNow,
    SyncPoints,
    Throttle,
    Update,
    Window,
)

__all__ = ["Action", "Apply", "Done", "Idle", "Snapshot", "Step", "WorkerMachine"]


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
        mean: Round of the last mean that the rank has (async); -1: none.
    """

    plan: int
    epoch: int
    steps: int
    is_last: bool = True
    mean: int = -1


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


Action = Step | Arrival | Done | Snapshot | Apply | BarrierTask | Idle | Leave
"""Next action of a rank. `Arrival`: enter the gate with it, then call `met` with the outcome. `Done`: report
its work (async). A barrier task: do it."""


@dataclass(slots=True)
class _UnderWay:
    """The order under way, and how far it is.

    Attributes:
        order: The order.
        cut: The report of an order that a hurried blocking round cut short for this one (async).
        left: Steps that were not taken for its sake.
        done: Steps so far.
        taken: Batches in them.
        reported: Those of the steps that were reported.
        held: Rounds that were held.
        in_round: Steps of the round that it is in.
    """

    order: StartEpoch
    cut: Done | None = None
    left: int = 0
    done: int = 0
    taken: int = 0
    reported: int = 0
    held: int = 0
    in_round: int = 0


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
        self._under_way: _UnderWay | None = None
        self._base = global_step  # steps of all ranks at the last mean
        self._next_round = 0  # no round before this one will ask for us
        self._sync_now = -1  # rounds up to this one are entered with the steps there are
        self._oldest_plan = 0  # orders of older plans are void
        self._snapshot: Snapshot | None = None
        self._throttle: Throttle | None = None
        self._leave: Leave | None = None

    @property
    def order(self) -> StartEpoch | None:
        """The order under way."""
        return None if self._under_way is None else self._under_way.order

    @property
    def window(self) -> Step | None:
        """The step of all ranks at whose gate it is, whether it has a part of it or not (exact)."""
        under_way = self._under_way
        if under_way is None:
            return None
        order, at = under_way.order, under_way.held
        if order.sync is None or order.parts is None:
            return None
        before = order.sync.global_step + at * order.sync.steps
        return Step(order.epoch, (order.batches[at],), before, order.metrics, order.parts[at])

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
            case Leave():
                self._leave = order if self._leave is None or order.reason is not None else self._leave

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
        under_way = self._under_way
        if under_way is None:
            if self._tasks:
                task = self._tasks.popleft()
                if isinstance(task, CopyReplica):
                    self.is_bad = False
                return task
            if not self._orders:
                return Idle()
            under_way = self._under_way = _UnderWay(self._orders.popleft())
        order, held = under_way.order, under_way.held
        sync = order.sync
        if sync is None:
            return self._next_free(under_way, in_step=in_step)
        before = sync.global_step + held * sync.steps
        # Without a sample in the part there is no step to take, and none is left out.
        is_idle = order.parts is not None and order.parts[held].samples == 0
        planned = 0 if is_idle else sync.every
        is_over = under_way.in_round >= planned or under_way.taken >= len(order.batches)
        if not is_over and (in_step or self._sync_now < sync.round + held):
            return self._step(under_way, position(before, under_way.in_round, sync.steps, planned))
        is_last = held == sync.count - 1
        is_inner = sync.inner and not is_last
        window = None if order.parts is None else Window(order.alone, sync.compare and is_last)
        return Arrival(
            self.rank,
            sync.round + held,
            # Of the order, where its rounds may be cut and are counted by the gates.
            sync.global_step if sync.inner else before,
            self.steps,
            self.samples,
            left=self._left(under_way, sync, planned, is_inner=is_inner) + under_way.left,
            drift=sync.drift and not is_inner,
            bad=self.is_bad,
            inner=is_inner,
            window=window,
        )

    def judged(self, arrival: Arrival, touched: bytes = b"") -> Arrival:
        """Write into an arrival all that is known by now of the replica's numbers, and of its gradients."""
        arrival.bad = self.is_bad
        if arrival.window is not None:
            arrival.window.touched = touched
        return arrival

    def trained(self, samples: int) -> None:
        """The step that `next` named is done."""
        self.steps += 1
        self.total_steps += 1
        self.samples += samples
        under_way = self._under_way
        if under_way is not None:
            under_way.done += 1
            under_way.in_round += 1
            under_way.taken += under_way.order.group

    def met(self, outcome: Outcome) -> Done | None:
        """The round is held; an answer says which order ended with it and is to be acknowledged."""
        under_way, order = self._under_way, self.order
        if under_way is None or order is None or order.sync is None:
            raise ProtocolError(f"rank {self.rank} got {outcome} without an order")
        self.unreported_samples += self.samples
        self.steps = self.samples = 0
        self.is_bad &= outcome.inner  # which voids nothing, so nobody is healed behind it
        self._snapshot = None
        self._base = outcome.global_step
        self._next_round = outcome.round + 1
        under_way.in_round = 0
        under_way.held += 1
        if not outcome.voids and under_way.held < order.sync.count:
            return None
        self.unreported_samples = 0
        self._under_way = None
        if outcome.voids:
            self._orders.clear()
            self._oldest_plan = order.plan + 1
            self.plans += 1
        return under_way.cut or Done(order.plan, order.epoch, under_way.done)

    def upcoming(self) -> list[tuple[int, int, SampleRange | None]]:
        """The (epoch, batch, part) that will be trained next, in this order, if no fact changes it."""
        later = [batch for order in self._orders for batch in _wanted(order)]
        under_way = self._under_way
        if under_way is None:
            return later
        gone = under_way.taken
        if under_way.order.parts is not None:
            # Windows without a sample for this rank are behind it, too.
            gone = under_way.held + under_way.in_round
        return [*_wanted(under_way.order, gone), *later]

    def _left(self, under_way: _UnderWay, sync: SyncPoints, planned: int, *, is_inner: bool) -> int:
        """Steps that the rank was to take and did not: before one of all machines, in all of the order."""
        if sync.inner and not is_inner:
            return sync.count * planned - sync.short - under_way.done
        return planned - under_way.in_round

    def _shorten(self, end: DataEnded) -> None:
        """Drop batches beyond the end of an epoch; at the gate they count as left: later orders are void."""
        self._orders = deque(order.until(end) for order in self._orders)
        if self._under_way is not None:
            self._under_way.order = self._under_way.order.until(end)
        self.plans += 1

    def _serve(self, order: RequestParams | Update) -> Action:
        if isinstance(order, RequestParams):
            self._snapshot = Snapshot(order.round, self.steps, 0 if self.is_bad else self.samples)
            return self._snapshot
        if self._snapshot is None or self._snapshot.round != order.round:
            raise ProtocolError(f"rank {self.rank} got {order}, its snapshot is {self._snapshot}")
        # Only the steps behind the snapshot are still this rank's own.
        self.steps -= self._snapshot.steps
        self.samples -= self._snapshot.samples
        self._base = order.global_step
        self._snapshot = None
        self._next_round = order.round + 1
        return Apply(order.round, self.steps)

    def _next_free(self, under_way: _UnderWay, *, in_step: bool) -> Action:
        order = under_way.order
        is_called = self._sync_now >= self._next_round and not in_step
        if is_called and any(later.sync is not None for later in self._orders):
            return self._skip_to_gate(under_way)
        fresh = under_way.done - under_way.reported
        if under_way.taken < len(order.batches):
            is_held = self.throttled is not None and not in_step
            if fresh and (is_held or fresh == order.report_every):
                under_way.reported = under_way.done
                return Done(order.plan, order.epoch, fresh, is_last=False, mean=self._next_round - 1)
            if is_held:
                return Idle()
            pace = order.pace
            if pace is None:
                return self._step(under_way, self._base)
            return self._step(under_way, position(self._base, self.steps, pace.steps, pace.quota))
        self._under_way = None
        return Done(order.plan, order.epoch, fresh, mean=self._next_round - 1)

    def _skip_to_gate(self, cut: _UnderWay) -> Action:
        """Go to the blocking round in the queue; the orders before it are dealt anew (async)."""
        left = cut.order.steps - cut.done
        while self._orders[0].sync is None:
            left += self._orders.popleft().steps
        self.plans += 1
        done = Done(cut.order.plan, cut.order.epoch, cut.done - cut.reported)
        self._under_way = _UnderWay(self._orders.popleft(), done, left)
        return self.next()

    def _step(self, under_way: _UnderWay, position: int) -> Step:
        order = under_way.order
        if order.parts is not None:
            at = under_way.held + under_way.in_round
            window = (order.batches[at],)
            return Step(order.epoch, window, position, order.metrics, order.parts[at], order.alone)
        batches = order.batches[under_way.taken : under_way.taken + order.group]
        return Step(order.epoch, batches, position, order.metrics)


def _wanted(order: StartEpoch, gone: int = 0) -> list[tuple[int, int, SampleRange | None]]:
    """Batches of an order that a rank trains, from number `gone` on."""
    if order.parts is None:
        return [(order.epoch, batch, None) for batch in order.batches[gone:]]
    windows = zip(order.batches[gone:], order.parts[gone:], strict=True)
    return [(order.epoch, window, part) for window, part in windows if part.samples]
