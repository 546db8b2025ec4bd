"""Asynchronous rounds: snapshots are averaged while the ranks train on, and no rank waits.

Batches go out in orders, two per rank, so that a rank always has the next one; `Throttle` stops a rank that
is ahead within its order. A round is opened when every rank has taken its count of steps or cannot move; it
passes through three states, each left by facts alone: snapshots are collected, averaged, applied. A change
of all ranks at once (a pause, a stop, a new learning rate, the end) is a blocking round at the gate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from flowdp.errors import ProtocolError
from flowdp.machine.async_rank import AHEAD, AsyncRank, RankIndex
from flowdp.machine.async_round import AsyncRound, Meeting
from flowdp.machine.epochs import EpochLedger, Epochs
from flowdp.machine.round_record import ShareChanges, reason_of, round_ended
from flowdp.machine.rounds import Averages, Constraints, Rounds, Shares
from flowdp.policy.cadence import Cadence
from flowdp.policy.drift import largest_drift
from flowdp.policy.lead import Overshoot, lead_limits
from flowdp.policy.ledger import ENDLESS
from flowdp.protocol.commands import Average, Command, RoundAbandoned, RoundEnded, Send
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
    Updated,
    Work,
)
from flowdp.protocol.position import Position

__all__ = ["AsyncRounds"]

ORDERS_PER_ROUND = 4
"""A rank's count goes out in about this many orders."""

REPORT_MS = 10.0
"""Ranks report their steps in about this time: only a report tells that a count is full, or that the slowest
rank has moved."""

SNAPSHOT_TIMEOUT_MS = 5000.0
"""How long a round waits for its snapshots; doubled when that was too short, halved when it was not."""


class OrderPlan:
    """The orders of each rank as the counts of steps want them; until the next measurement.

    Args:
        cadence: Counts and paces.
        groups: Batches that make one step of each rank. Shape (world_size,).

    Attributes:
        counts: Steps of each rank in a round. Shape (world_size,).
        turns: Place of each rank where several get orders. Shape (world_size,).
        steps: Steps of an order of each rank. Shape (world_size,).
        batches: Batches of an order of every rank.
        paces: Part of each rank in the steps of a round. Shape (world_size,).
        report_every: Steps of each rank between two reports. Shape (world_size,).
    """

    def __init__(self, cadence: Cadence, groups: Sequence[int]) -> None:
        self.counts = cadence.quotas
        # Those that would finish first are served first, so the end of the data goes to the fast ones.
        self.turns = [(ms, rank) for rank, ms in enumerate(cadence.ms_per_step)]
        self.steps = [math.ceil(count / ORDERS_PER_ROUND) for count in self.counts]
        self.batches = sum(steps * group for steps, group in zip(self.steps, groups, strict=True))
        whole = sum(self.counts)
        self.paces = [Pace(whole, count) for count in self.counts]
        self.report_every = [math.ceil(REPORT_MS / ms) if ms else 1 for ms in cadence.el_che.ms_per_batch]


class AsyncRounds(Rounds):
    """Deals batches in small orders and runs rounds beside the training.

    Args:
        epochs: Ledgers and tallies.
        cadence: Counts per rank.
        world_size: Ranks, at least 2.
    """

    shares: ClassVar[Shares] = "steps"
    averages: ClassVar[Averages] = "snapshots"
    cadence: Cadence

    def __init__(self, epochs: Epochs, cadence: Cadence, world_size: int) -> None:
        self.epochs = epochs
        self.cadence = cadence
        self.world_size = world_size
        self.global_step = 0
        self._bad: dict[int, tuple[int, int] | None] = {}
        self._is_bad = False  # some rank has said so since the last meeting
        self._ranks = [AsyncRank() for _ in range(world_size)]
        self._index = RankIndex(self._ranks)
        self._groups = epochs.groups or (1,) * world_size
        self._orders = OrderPlan(cadence, self._groups)
        self._overshoot = Overshoot(ENDLESS if epochs.batches is None else epochs.batches)
        self._round: AsyncRound | None = None
        self._meeting: Meeting | None = None
        self._next_round = 0
        self._plan = 0
        self._timeout_ms = SNAPSHOT_TIMEOUT_MS
        self._trained = 0  # steps of all ranks
        self._met_trained = 0  # until the last blocking round: nothing since, nothing to meet for
        self._round_start_ms = math.nan
        self._share_changes = ShareChanges(world_size)

    @property
    def is_idle(self) -> bool:
        """Whether no order and no round is out."""
        return self._round is None and self._meeting is None and not self._is_dirty

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank in a round."""
        return self.cadence.anchor

    @property
    def wants_meeting(self) -> bool:
        """Whether the ranks must meet before anything else: one of them has NaN or inf parameters."""
        return self._is_bad and self._is_dirty

    @property
    def next_round(self) -> int:
        """Number of the next round, where none is under way."""
        return self._next_round

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        return self.cadence.el_che.ms_per_batch

    def resume(self, position: Position) -> None:
        """Begin where another run stood; its measurements count where the number of ranks is the same."""
        self.global_step, self._next_round = position.global_step, position.round
        if position.anchor is not None and len(position.pace_ms) == self.world_size == position.world_size:
            self.cadence.restore(position.anchor, position.pace_ms, position.drifts)
            self._orders = OrderPlan(self.cadence, self._groups)

    @property
    def _is_dirty(self) -> bool:
        # An order that has become empty is still answered.
        return bool(self._index.out) or self._trained > self._met_trained

    def _change(self, rank: int) -> None:
        self._index.change(rank, self._orders.counts[rank])

    def _change_all(self) -> None:
        for rank in range(self.world_size):
            self._change(rank)

    # ------------------------------------------------------------------ facts
    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds."""
        match fact:
            case StepsDone():
                self._credit(fact.rank, self._ranks[fact.rank].reported(fact), fact.work)
                self._change(fact.rank)
            case SnapshotReady():
                # An answer to an abandoned round comes late and belongs nowhere; its rank may be sound again.
                if self._round is not None and self._round.number == fact.round:
                    self._is_bad |= fact.bad
                    self._round.snapshots[fact.rank] = fact
                    rank = self._ranks[fact.rank]
                    rank.snapshot = rank.mean + fact.steps
                    self._change(fact.rank)
            case Averaged():
                if self._round is not None and self._round.number == fact.round:
                    self._round.averaged = fact
                    return self._apply(self._round)
            case Updated():
                if self._round is None or self._round.number != fact.round:
                    raise ProtocolError(f"{fact} while {self._round} is under way")
                self._round.updated.add(fact.rank)
                if len(self._round.updated) == self.world_size:
                    return self._end_round(self._round, now_ms)
            case SyncAck():
                return self._take_ack(fact, now_ms)
            case _:
                raise ProtocolError(f"asynchronous rounds know no {fact}")
        return []

    def _credit(self, rank: int, order: StartEpoch, work: Work, wait_ms: float = 0.0) -> None:
        self._is_bad |= work.bad is not None
        self.epochs.count_back(order.epoch, rank, order.batches, work.steps)
        self.epochs.record(rank, work, wait_ms=wait_ms)
        self._ranks[rank].credit(order, work)
        self._trained += work.steps

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten the orders of an epoch whose end was read; one that becomes empty is answered, too."""
        cut = [rank for rank, state in enumerate(self._ranks) if state.shorten(end)]
        for rank in cut:
            self._change(rank)
        return [Send(rank, end) for rank in cut]

    # ------------------------------------------------------------------ decisions
    def pop_bad(self) -> dict[int, tuple[int, int] | None]:
        """Ranks found with NaN or inf parameters since the last call -> their first bad (epoch, batch)."""
        bad, self._bad = self._bad, {}
        return bad

    def decide(self, now_ms: float, constraints: Constraints) -> list[Command]:
        """Deal orders, open a round, or call a meeting. Orders are small, so a limit asks for no more."""
        hold = constraints.hold
        if self._meeting is not None:
            # The last one waits for everything that is dealt, which a stop or a pause does not.
            if not hold or self._meeting.is_hurried:
                return []
            self._meeting.is_hurried = True
            return self._sync_now(self._meeting.number)
        commands: list[Command] = []
        # Before the first step since the last meeting there is nothing to meet for.
        meet = (hold or constraints.meet) and self._is_dirty
        if not hold and not meet:
            commands += self._deal(now_ms)
        round_ = self._round
        if round_ is not None and not round_.is_averaging:
            if len(round_.snapshots) == self.world_size and not self._is_bad:
                round_.is_averaging = True
                self._timeout_ms = max(SNAPSHOT_TIMEOUT_MS, self._timeout_ms / 2)
                return [*commands, Average(round_.number, round_.samples(self.world_size))]
            is_late = now_ms >= round_.deadline_ms
            if not (is_late or meet):
                return commands
            self._timeout_ms *= 2 if is_late else 1
            commands.append(self._abandon(round_))
        elif round_ is not None:
            return commands
        if self._is_dirty and (meet or (self.epochs.is_exhausted and not self._index.held)):
            return commands + self._meet(is_hurried=meet)
        if not hold and self._is_due():
            commands += self._open_round(now_ms)
        return commands

    def deadline_ms(self) -> float | None:
        """Time to ask `decide` again: a snapshot is overdue then."""
        return None if self._round is None or self._round.is_averaging else self._round.deadline_ms

    def _deal(self, now_ms: float) -> list[Command]:
        commands: list[Command] = []
        plan, index = self._orders, self._index
        if index.starved and self.epochs.dealing(now_ms) is not None:
            index.changed |= index.starved
        lead = self.cadence.options.max_batch_diff
        if lead is not None:  # each rank's limit follows from the steps of others
            index.changed.update(range(self.world_size))
        limits = None if lead is None else self._lead_limits(lead)
        was_exhausted = self.epochs.is_exhausted
        for rank in sorted(index.changed, key=plan.turns.__getitem__):
            state, orders = self._ranks[rank], list[StartEpoch]()
            limit = self._limit(rank, None if limits is None else limits[rank])
            index.starved.discard(rank)
            while len(state.orders) < AHEAD and state.dealt < limit:
                ledger = self.epochs.dealing(now_ms)
                if ledger is None:
                    index.starved.add(rank)
                    break
                steps = plan.steps[rank] if ledger.remaining > plan.batches else 1
                orders.append(self._order(ledger, rank, ledger.deal_to(rank, steps)))
                state.give(orders[-1])
            commands += self._throttle(rank, limit)
            commands += [Send(rank, order) for order in orders]
            index.sort(rank, plan.counts[rank])
            if lead is not None and orders and self.epochs.is_exhausted != was_exhausted:
                # Ranks that have none now get none any more, and hold no other back.
                was_exhausted = not was_exhausted
                limits = self._lead_limits(lead)
        index.changed.clear()
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
        state, reason = self._ranks[rank], "at its lead limit"
        if not state.orders:
            if state.limit is not None and state.limit <= state.dealt:
                return []  # its last Throttle says why it has none
            reason = reason if state.dealt >= limit else "no data"
            limit = state.dealt
        elif state.reach == min(limit, state.dealt):
            return []
        state.limit = limit
        return [Send(rank, Throttle(limit, reason))]

    def _limit(self, rank: int, lead_limit: int | None) -> int:
        """Steps that a rank may take since the run began, by its last snapshot and those of the others."""
        count = self._orders.counts[rank] + self._overshoot.value
        return self._ranks[rank].snapshot + (count if lead_limit is None else lead_limit)

    def _lead_limits(self, lead: int) -> list[int | None]:
        # A rank with orders, or that could get some, is not held back by the data.
        has_more = not self.epochs.is_exhausted
        may_move = [has_more or bool(state.orders) for state in self._ranks]
        return lead_limits([state.done for state in self._ranks], may_move, lead)

    def _is_due(self) -> bool:
        return not self._index.short and sum(state.done for state in self._ranks) > 0

    def _open_round(self, now_ms: float) -> list[Command]:
        self._round = AsyncRound(self._next_round, now_ms + self._timeout_ms)
        self._next_round += 1
        return [Send(rank, RequestParams(self._round.number)) for rank in range(self.world_size)]

    def _abandon(self, round_: AsyncRound) -> Command:
        """Give the round up; its steps stay with their ranks, and count in the next one."""
        for state in self._ranks:
            state.snapshot = state.mean
        self._change_all()
        self._round = None
        return RoundAbandoned(round_.number, round_.missing(self.world_size))

    def _meet(self, is_hurried: bool) -> list[Command]:
        number = self._next_round
        self._meeting, self._next_round = Meeting(number, is_hurried), number + 1
        # The meeting belongs to the epoch whose batches are behind it, if any are.
        epoch = max((rank.orders[-1].epoch for rank in self._ranks if rank.orders), default=self.epochs.done)
        sync = SyncPoints(number, 0, 1, self.global_step, 0)
        orders: list[Command] = [
            Send(rank, StartEpoch(self._plan, epoch, (), sync)) for rank in range(self.world_size)
        ]
        return [*orders, *self._sync_now(number)] if is_hurried else orders

    def _sync_now(self, number: int) -> list[Command]:
        return [Send(rank, SyncNow(number)) for rank in range(self.world_size)]

    # ------------------------------------------------------------------ rounds
    def _apply(self, round_: AsyncRound) -> list[Command]:
        self.global_step += sum(snapshot.steps for snapshot in round_.snapshots.values())
        return [Send(rank, Update(round_.number, self.global_step)) for rank in range(self.world_size)]

    def _end_round(self, round_: AsyncRound, now_ms: float) -> list[Command]:
        averaged = round_.averaged
        if averaged is None:
            raise ProtocolError(f"round {round_.number} was applied before it was averaged")
        steps = [round_.snapshots[rank].steps for rank in range(self.world_size)]
        for state, taken in zip(self._ranks, steps, strict=True):
            state.mean += taken
        paces = [state.pace_ms for state in self._ranks]
        reason = self.cadence.measured(paces, steps, averaged.sync_ms, averaged.drifts or None)
        self._overshoot.averaged(self.cadence.action)
        self._orders = OrderPlan(self.cadence, self._groups)
        self._change_all()
        drift = largest_drift(averaged.drifts) if averaged.drifts else None
        self._round = None
        samples = round_.samples(self.world_size)
        record = self._record(round_.number, steps, samples, averaged.sync_ms, drift, reason, now_ms)
        share = self._share_changes.report(self.cadence.quotas)
        return [replace(record, param_norm=averaged.norm, share=share)]

    def _take_ack(self, ack: SyncAck, now_ms: float) -> list[Command]:
        meeting = self._meeting
        if meeting is None or meeting.number != ack.outcome.round or ack.rank in meeting.acks:
            raise ProtocolError(f"unexpected {ack}: {meeting} is under way")
        meeting.acks[ack.rank] = ack
        if len(meeting.acks) < self.world_size:
            return []
        outcome = meeting.outcome()
        for rank, state in enumerate(self._ranks):
            theirs = meeting.acks[rank]
            if state.orders:
                self._credit(rank, state.orders.popleft(), theirs.work, theirs.wait_ms)
            for order in state.orders:
                self.epochs.count_back(order.epoch, rank, order.batches, 0)
                state.dealt -= order.steps
            state.orders.clear()
            state.mean = state.snapshot = state.trained
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
        self._change_all()
        sync_ms = max(theirs.sync_ms for theirs in meeting.acks.values())
        reason = reason_of(outcome) or "meeting"
        return [self._record(outcome.round, outcome.steps, outcome.samples, sync_ms, None, reason, now_ms)]

    def _record(
        self,
        number: int,
        steps: Sequence[int],
        samples: Sequence[int],
        sync_ms: float,
        drift: float | None,
        reason: str,
        now_ms: float,
    ) -> RoundEnded:
        works = [state.works for state in self._ranks]
        flat = [work for theirs in works for work in theirs]
        epoch = max((work.epoch for work in flat), default=self.epochs.done)
        epoch = self.epochs.close_round(epoch, sync_ms, drift, 1)
        start_ms, self._round_start_ms = self._round_start_ms, now_ms
        record = round_ended(
            works,
            round=number,
            rounds=1,
            epoch=epoch,
            global_step=self.global_step,
            steps=steps,
            samples=samples,
            last=flat[-1] if flat else None,
            wall_ms=0.0 if math.isnan(start_ms) else now_ms - start_ms,
            wait_ms=(0.0,) * self.world_size,
            sync_ms=sync_ms,
            anchor=self.anchor,
            drift=drift,
            reason=reason,
        )
        for state in self._ranks:
            state.works = []
        return record

    def check(self) -> None:
        """Check that the orders that are out agree with the ledgers.

        Raises:
            ProtocolError: They do not.
        """
        out: dict[int, int] = {}
        for state in self._ranks:
            for order in state.orders:
                out[order.epoch] = out.get(order.epoch, 0) + len(order.batches)
            state.check()
        for epoch, batches in out.items():
            if batches and self.epochs.of(epoch).dealt != batches:
                raise ProtocolError(f"epoch {epoch}: {batches} batches are out, the ledger says otherwise")
