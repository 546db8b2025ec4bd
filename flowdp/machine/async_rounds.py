"""Asynchronous rounds: snapshots are averaged while the ranks train on, and no rank waits.

Batches go out in orders, two per rank, so that a rank always has the next one; `Throttle` stops a rank that
is ahead within its order. A round is opened when every rank has taken its count of steps or cannot move; its
snapshots are collected, then averaged, and each rank applies the mean before it obeys a later order. A change
of all ranks at once (a pause, a stop, a new learning rate, the end) is a blocking round at the gate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import ClassVar

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import EpochLedger, Epochs
from flowdp.machine.rounds import Averages, Rounds, Shares, outcome_of, reason_of, summary
from flowdp.policy.cadence import Cadence
from flowdp.policy.drift import Overshoot, largest_drift, lead_limits
from flowdp.policy.ledger import ENDLESS
from flowdp.protocol.commands import Average, Command, RoundEnded, Send
from flowdp.protocol.messages import (
    Averaged,
    DataEnded,
    Fact,
    Pace,
    RequestParams,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    SyncNow,
    SyncPoints,
    Throttle,
    Update,
    Work,
)
from flowdp.protocol.position import Position

__all__ = ["AHEAD", "AsyncRank", "AsyncRounds"]

AHEAD = 2
"""Orders per rank that are out."""

ORDERS_PER_ROUND = 4
"""A rank's count goes out in about this many orders."""

REPORT_MS = 10.0
"""Ranks report their steps in about this time: only a report tells that a count is full, or that the slowest
rank has moved."""


@dataclass(slots=True)
class AsyncRank:
    """One rank; all counts are steps since the run began.

    Attributes:
        orders: Orders that are out, oldest first.
        reported: Batches of the oldest order that it has reported.
        dealt: Steps of all its orders.
        trained: Steps it has reported.
        mean: Steps in the last mean of all ranks.
        before: Steps in the one before.
        has_mean: The rank has said that it has the last mean, not only the one before.
        snapshot: Steps in the last snapshot, applied or under way.
        works: Its reports since the last round.
        limit: Steps at which it has to stop, by its last `Throttle`.
        bad: (epoch, batch) of the first step since the last meeting with NaN or inf values.
    """

    orders: deque[StartEpoch] = field(default_factory=deque)
    reported: int = 0
    dealt: int = 0
    trained: int = 0
    mean: int = 0
    before: int = 0
    has_mean: bool = True
    snapshot: int = 0
    works: list[Work] = field(default_factory=list)
    limit: int = ENDLESS
    bad: tuple[int, int] | None = None

    @property
    def done(self) -> int:
        """Steps that it has reported since its last snapshot; negative while a report is under way."""
        return self.trained - self.snapshot

    @property
    def pace_ms(self) -> float:
        """Time of one step: the median over its reports since the last round; 0 where none measured it."""
        measured = [work.pace_ms for work in self.works if work.pace_ms > 0.0]
        return median(measured) if measured else 0.0

    def give(self, order: StartEpoch) -> None:
        """Send it an order."""
        self.orders.append(order)
        self.dealt += order.steps

    def report(self, done: StepsDone) -> tuple[int, ...]:
        """Take a report; returns the batches of the oldest order that it is about.

        Raises:
            ProtocolError: It is about another order.
        """
        order = self.orders[0] if self.orders else None
        if order is None or (order.plan, order.epoch) != (done.plan, done.work.epoch):
            raise ProtocolError(f"unexpected {done}: the oldest order is {order}")
        if done.is_last:
            return self.end_order(done.work)
        first, self.reported = self.reported, self.reported + done.work.steps * order.group
        self._credit(done.work)
        return order.batches[first : self.reported]

    def end_order(self, work: Work) -> tuple[int, ...]:
        """Take the last report of the oldest order; returns the batches of it that no other was about.

        Those of them that were not trained are dealt anew.
        """
        order, first = self.orders.popleft(), self.reported
        self.reported = 0
        self._credit(work)
        self.dealt -= order.steps - first // order.group - work.steps
        return order.batches[first:]

    def _credit(self, work: Work) -> None:
        self.trained += work.steps
        self.works.append(work)
        self.bad = self.bad or work.bad

    def shorten(self, end: DataEnded) -> bool:
        """Drop the batches that the epoch does not have; returns whether there were any."""
        before, self.orders = self.orders, deque(order.until(end) for order in self.orders)
        self.dealt -= sum(order.steps for order in before) - sum(order.steps for order in self.orders)
        return before != self.orders


@dataclass(slots=True)
class _Round:
    """A round: snapshots are collected, then averaged.

    Attributes:
        number: Number of the round.
        snapshots: Those that have come.
        is_averaging: All have come, and are on their way into the mean.
    """

    number: int
    snapshots: dict[int, SnapshotReady] = field(default_factory=dict)
    is_averaging: bool = False


@dataclass(slots=True)
class _Meeting:
    """A meeting of all ranks at the gate.

    Attributes:
        number: Its number among the rounds.
        is_hurried: Ranks are to come with the steps they have.
        acks: Acknowledgments so far, by rank.
    """

    number: int
    is_hurried: bool
    acks: dict[int, SyncAck] = field(default_factory=dict)


NO_WORK = Work(0, 0, 0)


class _OrderPlan:
    """The orders of each rank as the counts of steps want them; until the next measurement.

    Args:
        cadence: Counts and paces.
        groups: Batches that make one step of each rank. Shape (world_size,).

    Attributes:
        counts: Steps of each rank in a round. Shape (world_size,).
        turns: The ranks: those that would finish first are served first, so the end of the data goes to them.
        steps: Steps of an order of each rank. Shape (world_size,).
        batches: Batches of an order of every rank.
        paces: Part of each rank in the steps of a round. Shape (world_size,).
        report_every: Steps of each rank between two reports. Shape (world_size,).
    """

    def __init__(self, cadence: Cadence, groups: Sequence[int]) -> None:
        self.counts = cadence.quotas
        self.turns = sorted(range(len(groups)), key=cadence.ms_per_step.__getitem__)
        self.steps = [math.ceil(count / ORDERS_PER_ROUND) for count in self.counts]
        self.batches = sum(steps * group for steps, group in zip(self.steps, groups, strict=True))
        whole = sum(self.counts)
        self.paces = [Pace(whole, count) for count in self.counts]
        self.report_every = [math.ceil(REPORT_MS / ms) if ms else 1 for ms in cadence.el_che.ms_per_batch]


class AsyncRounds(Rounds):
    """Deals batches in small orders and runs rounds beside the training.

    Args:
        config: The run, of at least 2 ranks.
        epochs: Ledgers and tallies.
    """

    shares: ClassVar[Shares] = "steps"
    averages: ClassVar[Averages] = "snapshots"
    cadence: Cadence

    def __init__(self, config: CoordinatorConfig, epochs: Epochs) -> None:
        super().__init__(config, epochs)
        self.cadence = Cadence(config.world_size, config.cadence, config.ratios)
        self._is_bad = False  # some rank has said so since the last meeting
        self._ranks = [AsyncRank() for _ in range(config.world_size)]
        self._groups = config.groups or (1,) * config.world_size
        self._orders = _OrderPlan(self.cadence, self._groups)
        self._overshoot = Overshoot(ENDLESS if config.batches is None else config.batches)
        self._round: _Round | None = None
        self._meeting: _Meeting | None = None
        self._trained = 0  # steps of all ranks
        self._mean_round = -1  # of the last mean
        self._met_trained = 0  # until the last blocking round: nothing since, nothing to meet for
        self._round_start_ms = math.nan

    @property
    def is_idle(self) -> bool:
        """Whether no order and no round is out."""
        return self._round is None and self._meeting is None and not self._is_dirty

    @property
    def wants_meeting(self) -> bool:
        """Whether the ranks must meet before anything else: one of them has NaN or inf parameters."""
        return self._is_bad and self._is_dirty

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        return self.cadence.el_che.ms_per_batch

    def resume(self, position: Position) -> None:
        """Begin where another run stood; its measurements count where the number of ranks is the same."""
        super().resume(position)
        self._orders = _OrderPlan(self.cadence, self._groups)

    @property
    def _is_dirty(self) -> bool:
        # An order that has become empty is still answered.
        return self._trained > self._met_trained or any(state.orders for state in self._ranks)

    @property
    def _is_held(self) -> bool:
        """Whether a rank has orders beyond its limit."""
        return any(state.orders and state.limit < state.dealt for state in self._ranks)

    # ------------------------------------------------------------------ facts
    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds."""
        match fact:
            case StepsDone():
                self._credit(fact.rank, self._ranks[fact.rank].report(fact), fact.work)
                self._ranks[fact.rank].has_mean |= fact.mean == self._mean_round
            case SnapshotReady():
                # An answer to a round that was given up belongs nowhere; its rank may be sound again.
                if self._round is not None and self._round.number == fact.round:
                    self._is_bad |= fact.bad
                    self._round.snapshots[fact.rank] = fact
                    state = self._ranks[fact.rank]
                    state.snapshot = state.mean + fact.steps
                    state.has_mean = True  # without it there would be no other snapshot
            case Averaged():
                if self._round is None or self._round.number != fact.round:
                    raise ProtocolError(f"{fact} while {self._round} is under way")
                return self._end_round(self._round, fact, now_ms)
            case SyncAck():
                return self._take_ack(fact, now_ms)
            case _:
                raise ProtocolError(f"asynchronous rounds know no {fact}")
        return []

    def _credit(self, rank: int, batches: tuple[int, ...], work: Work) -> None:
        """Count a report about these batches."""
        self._is_bad |= work.bad is not None
        self.epochs.count_back(work.epoch, rank, batches, work.steps)
        self.epochs.record(rank, work)
        self._trained += work.steps

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten the orders of an epoch whose end was read; one that becomes empty is answered, too."""
        return [Send(rank, end) for rank, state in enumerate(self._ranks) if state.shorten(end)]

    # ------------------------------------------------------------------ decisions
    def decide(self, now_ms: float, *, hold: bool = False, meet: bool = False) -> list[Command]:
        """Deal orders, open a round, or call a meeting. Orders are small, so a limit asks for no more."""
        if self._meeting is not None:
            # The last one waits for everything that is dealt, which a stop or a pause does not.
            if not hold or self._meeting.is_hurried:
                return []
            self._meeting.is_hurried = True
            return self._send_all(SyncNow(self._meeting.number))
        commands: list[Command] = []
        # Before the first step since the last meeting there is nothing to meet for.
        meet = (hold or meet) and self._is_dirty
        if not hold and not meet:
            commands += self._deal(now_ms)
        round_ = self._round
        if round_ is not None and round_.is_averaging:
            return commands
        if round_ is not None:
            if len(round_.snapshots) == self.world_size and not self._is_bad:
                round_.is_averaging = True
                return [*commands, Average(round_.number, self._samples(round_))]
            if not meet:
                return commands
            self._give_up()
        if self._is_dirty and (meet or (self.epochs.is_exhausted and not self._is_held)):
            return commands + self._meet(is_hurried=meet)
        if not hold and self._is_due():
            self._round = _Round(self.next_round)
            self.next_round += 1
            commands += self._send_all(RequestParams(self._round.number))
        return commands

    def _deal(self, now_ms: float) -> list[Command]:
        commands: list[Command] = []
        plan = self._orders
        limits, was_exhausted = self._limits(), self.epochs.is_exhausted
        for rank in plan.turns:
            state, orders = self._ranks[rank], list[StartEpoch]()
            while len(state.orders) < AHEAD and state.dealt < limits[rank]:
                ledger = self.epochs.dealing(now_ms)
                if ledger is None:
                    break
                steps = plan.steps[rank] if ledger.remaining > plan.batches else 1
                orders.append(self._order(ledger, rank, ledger.deal_to(rank, steps)))
                state.give(orders[-1])
            commands += self._throttle(rank, limits[rank])
            commands += [Send(rank, order) for order in orders]
            if orders and self.epochs.is_exhausted != was_exhausted:
                # Ranks that have none now get none any more, and hold no other back.
                was_exhausted = not was_exhausted
                limits = self._limits()
        return commands

    def _order(self, ledger: EpochLedger, rank: int, batches: tuple[int, ...]) -> StartEpoch:
        return StartEpoch(
            self._plan,
            ledger.epoch,
            batches,
            pace=self._orders.paces[rank],
            metrics=self.epochs.metrics,
            group=ledger.groups[rank],
            report_every=self._orders.report_every[rank],
        )

    def _throttle(self, rank: int, limit: int) -> list[Command]:
        """Hold a rank back at its limit, or release it; goes out before the orders that it holds back."""
        state, reason = self._ranks[rank], "the others are too far behind"
        if not state.orders:
            if state.limit <= state.dealt:
                return []  # its last Throttle says why it has none
            reason = reason if state.dealt >= limit else "no data"
            limit = state.dealt
        elif min(state.limit, state.dealt) == min(limit, state.dealt):
            return []  # it can take the same steps
        state.limit = limit
        return [Send(rank, Throttle(limit, reason))]

    def _limits(self) -> list[int]:
        """Steps that each rank may take since the run began, by its count or by the steps of the others."""
        ranks, lead = self._ranks, self.cadence.options.max_batch_diff
        counts = zip(ranks, self._orders.counts, strict=True)
        own = [state.snapshot + count + self._overshoot.value for state, count in counts]
        if lead is None:
            return own
        # A rank with orders, or that could get some, is not held back by the data.
        has_more = not self.epochs.is_exhausted
        moves = [has_more or bool(state.orders) for state in ranks]
        by_lead = lead_limits([state.trained - state.mean for state in ranks], moves, lead)
        # Two ranks of which one may not have the last mean yet both have the one before.
        late = [may and not state.has_mean for may, state in zip(moves, ranks, strict=True)]
        by_late = lead_limits([state.trained - state.before for state in ranks], late, lead)
        for rank, state in enumerate(ranks):
            since, since_before = by_lead[rank], by_late[rank]
            if since is not None:
                own[rank] = state.mean + since
            if since_before is not None:
                own[rank] = min(own[rank], state.before + since_before)
        return own

    def _is_due(self) -> bool:
        counts = zip(self._ranks, self._orders.counts, strict=True)
        is_short = any(state.orders and state.done < count for state, count in counts)
        return not is_short and sum(state.done for state in self._ranks) > 0

    def _give_up(self) -> None:
        """Give the open round up for a meeting; its steps stay with their ranks, and count there."""
        for state in self._ranks:
            state.snapshot = state.mean
        self._round = None

    def _meet(self, is_hurried: bool) -> list[Command]:
        number = self.next_round
        self._meeting, self.next_round = _Meeting(number, is_hurried), number + 1
        # The meeting belongs to the epoch whose batches are behind it, if any are.
        epoch = max((rank.orders[-1].epoch for rank in self._ranks if rank.orders), default=self.epochs.done)
        orders = self._send_all(
            StartEpoch(self._plan, epoch, (), SyncPoints(number, 0, 1, self.global_step, 0))
        )
        return [*orders, *self._send_all(SyncNow(number))] if is_hurried else orders

    def _send_all(self, order: StartEpoch | SyncNow | RequestParams | Update) -> list[Command]:
        return [Send(rank, order) for rank in range(self.world_size)]

    # ------------------------------------------------------------------ rounds
    def _samples(self, round_: _Round) -> tuple[int, ...]:
        """The weights of all snapshots. Shape (world_size,)."""
        return tuple(round_.snapshots[rank].samples for rank in range(self.world_size))

    def _end_round(self, round_: _Round, averaged: Averaged, now_ms: float) -> list[Command]:
        steps = tuple(round_.snapshots[rank].steps for rank in range(self.world_size))
        self.global_step += sum(steps)
        for state, taken in zip(self._ranks, steps, strict=True):
            state.before, state.mean, state.has_mean = state.mean, state.mean + taken, False
        self._mean_round = round_.number
        paces = [state.pace_ms for state in self._ranks]
        reason = self.cadence.measured(paces, steps, averaged.sync_ms, averaged.drifts or None)
        self._overshoot.averaged(self.cadence.action)
        self._orders = _OrderPlan(self.cadence, self._groups)
        drift = largest_drift(averaged.drifts) if averaged.drifts else None
        self._round = None
        samples = self._samples(round_)
        record = self._record(round_.number, steps, samples, averaged.sync_ms, drift, reason, now_ms)
        share = self._changed_shares(self.cadence.quotas)
        update = Update(round_.number, self.global_step)
        return [*self._send_all(update), replace(record, param_norm=averaged.norm, share=share)]

    def _take_ack(self, ack: SyncAck, now_ms: float) -> list[Command]:
        meeting = self._meeting
        if meeting is None or meeting.number != ack.outcome.round or ack.rank in meeting.acks:
            raise ProtocolError(f"unexpected {ack}: {meeting} is under way")
        meeting.acks[ack.rank] = ack
        if len(meeting.acks) < self.world_size:
            return []
        outcome = outcome_of(meeting.acks)
        for rank, state in enumerate(self._ranks):
            theirs = meeting.acks[rank]
            if state.orders:
                self._credit(rank, state.end_order(theirs.work), theirs.work)
            for order in state.orders:
                self.epochs.count_back(order.epoch, rank, order.batches, 0)
                state.dealt -= order.steps
            state.orders.clear()
            state.mean = state.snapshot = state.trained
            state.has_mean = True
        self.epochs.rewind()
        self.global_step = outcome.global_step
        self._meeting = None
        self._bad = {rank: self._ranks[rank].bad for rank in outcome.bad}
        self._is_bad = False
        for state in self._ranks:
            state.bad = None
        if outcome.voids:
            self._plan += 1
        self._met_trained = self._trained
        sync_ms = max(theirs.sync_ms for theirs in meeting.acks.values())
        reason = reason_of(outcome) or "all devices meet"
        return [self._record(outcome.round, outcome.steps, outcome.samples, sync_ms, None, reason, now_ms)]

    def _record(
        self,
        number: int,
        steps: tuple[int, ...],
        samples: tuple[int, ...],
        sync_ms: float,
        drift: float | None,
        reason: str,
        now_ms: float,
    ) -> RoundEnded:
        flat = [work for state in self._ranks for work in state.works]
        works = [Work.total(state.works or (NO_WORK,)) for state in self._ranks]
        epoch = max((work.epoch for work in flat), default=self.epochs.done)
        start_ms, self._round_start_ms = self._round_start_ms, now_ms
        for state in self._ranks:
            state.works = []
        return RoundEnded(
            round=number,
            rounds=1,
            epoch=self.epochs.close_round(epoch, sync_ms, drift, 1),
            global_step=self.global_step,
            steps=steps,
            samples=samples,
            wall_ms=0.0 if math.isnan(start_ms) else now_ms - start_ms,
            sync_ms=sync_ms,
            anchor=self.anchor,
            drift=drift,
            reason=reason,
            **summary(works, flat[-1] if flat else works[0]),
        )
