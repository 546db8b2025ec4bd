"""Planned rounds (sync, cadence, exact, one device): while round k runs, round k + 1 lies ready.

No wake-up of the coordinator is on the critical path: workers find the next order in their inbox. An order is
settled when all members have acknowledged it; an outcome that voids the orders behind brings their batches
back to the ledger, to be planned anew. Subclasses choose the batches of a round.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from flowdp.errors import ProtocolError
from flowdp.machine.armed_rounds import ArmedRounds, Dealt, HeldRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import EpochLedger, Epochs
from flowdp.machine.rounds import Averages, Rounds, Shares, reason_of, summary
from flowdp.policy.drift import largest_drift
from flowdp.protocol.commands import Command, RoundEnded, Send
from flowdp.protocol.messages import DataEnded, Exiting, Fact, StartEpoch, SyncAck, SyncNow, SyncPoints
from flowdp.protocol.position import Position

__all__ = ["PlannedRounds", "SingleRounds", "StepTimes", "SyncRounds"]

AHEAD = 2
"""Orders per rank that are out: the one in progress and the next."""

ORDER_MS = 200.0
"""Rounds of one step, and the steps of a single device, are armed together for about this time ..."""

ORDER_STEPS = 500
"""... and for at most this many steps per rank."""

LATE_FACTOR = 1.25
"""A round that takes longer than this times its prediction is hurried ..."""

LATE_MS = 20.0
"""... if that is at least this much longer, so that noise does not shorten rounds of a few milliseconds."""


class StepTimes:
    """Measured times of steps and averagings.

    Args:
        world_size: Ranks.

    Attributes:
        pace_ms: Time of one step per rank; 0 where not measured. Shape (world_size,).
        sync_ms: Averaging time of the last round.
        inner_ms: That of an inner round, on average over the last order that had some.
    """

    def __init__(self, world_size: int) -> None:
        self.pace_ms = [0.0] * world_size
        self.sync_ms = 0.0
        self.inner_ms = 0.0

    @property
    def steps_at_once(self) -> int:
        """Rounds of one step to arm together; 1 before the first measurement."""
        slowest = max(self.pace_ms)
        return 1 if slowest == 0 else min(ORDER_STEPS, max(1, int(ORDER_MS / (slowest + self.sync_ms))))


class PlannedRounds(Rounds):
    """Plans rounds ahead and settles them.

    Args:
        config: The run.
        epochs: Ledgers and tallies.

    Attributes:
        may_hurry: Whether a round in progress may be cut short; else no bit depends on the clock.
    """

    averages: ClassVar[Averages] = "parameters"
    may_hurry: ClassVar[bool] = False
    _inner_rounds = 1  # of so many rounds only the last is one of all machines

    def __init__(self, config: CoordinatorConfig, epochs: Epochs) -> None:
        super().__init__(config, epochs)
        self.times = StepTimes(config.world_size)
        self._present = list(range(config.world_size))
        self._unreported: dict[int, int] = {}  # samples of ranks that are gone
        self._armed: deque[ArmedRounds] = deque()
        self._hurried = -1

    @property
    def is_idle(self) -> bool:
        """Whether no order is out."""
        return not self._armed

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        return tuple(self.times.pace_ms)

    def resume(self, position: Position) -> None:
        """Begin where another run stood; its measurements count where the number of ranks is the same."""
        super().resume(position)
        if position.world_size == self.world_size and len(position.pace_ms) == self.world_size:
            self.times.pace_ms = list(position.pace_ms)

    def leave(self, rank: int, unreported_samples: int, now_ms: float) -> list[Command]:
        """Go on without a rank that has failed: its steps since the last mean are dealt to the others.

        It takes no part in the round in progress, which voids the orders behind.

        Args:
            rank: Rank index.
            unreported_samples: Samples that means hold and no acknowledgment of the rank has reported.
            now_ms: The time.
        """
        self._present.remove(rank)
        self._unreported[rank] = unreported_samples
        self.times.pace_ms[rank] = 0.0
        records = self._settle_all(now_ms)
        if not self._armed:
            self.epochs.reassign(rank, self._present)
        return records

    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take an acknowledgment, or the failure of a rank."""
        if isinstance(fact, Exiting):
            return self.leave(fact.rank, fact.unreported_samples, now_ms)
        if not isinstance(fact, SyncAck):
            raise ProtocolError(f"planned rounds know no {fact}")
        # A fast rank's answer to the next order may overtake a slow rank's answer to this one.
        armed = next((a for a in self._armed if a.sync.round <= fact.outcome.round <= a.last_round), None)
        if armed is None or fact.rank in armed.acks or fact.rank not in self._present:
            raise ProtocolError(f"unexpected {fact}; out are {[armed.sync for armed in self._armed]}")
        armed.acks[fact.rank] = fact
        return self._settle_all(now_ms)

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten the orders that are out in an epoch whose end was read.

        The ranks come to the gate without the batches that never existed, so the outcome voids the orders
        behind. Under sync that is the same round at whatever moment the end is read.
        """
        cut = {rank for armed in self._armed for rank in armed.shorten(end)}
        return [Send(rank, end) for rank in self._present if rank in cut]

    def decide(self, now_ms: float, *, hold: bool = False, meet: bool = False) -> list[Command]:
        """Arm the rounds that are due.

        All ranks meet behind each, so a wish to meet needs no order, but where inner rounds come before that.
        """
        commands: list[Command] = []
        while not hold and self._may_arm:
            orders = self._arm(now_ms)
            if not orders:
                break
            commands += orders
        if self._armed and self.may_hurry:
            armed = self._armed[0]
            # An order that was armed just now ends with the first outcome behind the wish in any case.
            is_called = hold or (meet and armed.sync.inner and not commands)
            if self._hurried < armed.last_round and (is_called or now_ms >= self._late_ms(armed)):
                self._hurried = armed.last_round
                commands += [Send(rank, SyncNow(armed.last_round)) for rank in self._present]
        return commands

    def deadline_ms(self) -> float | None:
        """Time at which the round in progress is late; None: never."""
        if not self._armed or not self.may_hurry or self._hurried >= self._armed[0].last_round:
            return None
        late = self._late_ms(self._armed[0])
        return None if math.isinf(late) else late

    # ------------------------------------------------------------------ differences between the policies
    @abstractmethod
    def _deal(self, ledger: EpochLedger) -> Dealt:
        """Deal the batches of the next order."""

    @property
    def _is_paced(self) -> bool:
        """Whether speeds are known, so that rounds can be planned ahead."""
        return any(self.times.pace_ms)

    @property
    def _predicted_pace_ms(self) -> Sequence[float]:
        """Time of one step per rank, to predict the duration of a round; empty where none is predicted."""
        return ()

    @property
    def _wants_drift(self) -> bool:
        """Whether the next round measures the distance from the mean."""
        return False

    @property
    def _weights(self) -> Sequence[float]:
        """Shares of the ranks in the rounds to come, in any scale; empty where nothing changes them."""
        return ()

    def _count_back(self, held: HeldRounds) -> None:
        """Count the dealt batches back, trained or not."""
        for rank, work in enumerate(held.works):
            self.epochs.count_back(held.armed.epoch, rank, held.armed.dealt.hands[rank], work.steps)

    def _measure(self, held: HeldRounds) -> str:
        """Take the measurements; returns the reason of the divergence guard, or ""."""
        self.times.sync_ms = held.sync_ms
        if held.armed.sync.inner:
            self.times.inner_ms = held.inner_ms / max(1, held.rounds - 1)
        for rank in self._present:
            if held.works[rank].pace_ms > 0:
                self.times.pace_ms[rank] = held.works[rank].pace_ms
        return ""

    # ------------------------------------------------------------------ planning
    @property
    def _may_arm(self) -> bool:
        # The first order measures: those behind it wait for the measurement. Asked first, as it is the cheap
        # question, and the answer to nearly every acknowledgment.
        if len(self._armed) >= (AHEAD if self._is_paced else 1):
            return False
        # A replica that one rank reports as bad while others are still a round behind is healed first.
        return not any(armed.has_bad for armed in self._armed)

    @property
    def _next_step(self) -> int:
        """Global step before the next round to be armed."""
        return self._armed[-1].end_step if self._armed else self.global_step

    @property
    def _room(self) -> int:
        """Steps of all ranks that may be armed."""
        return ORDER_STEPS * self.world_size if self.limit is None else self.limit - self._next_step

    def _arm(self, now_ms: float) -> list[Command]:
        before = self._next_step
        ledger = self.epochs.dealing(now_ms) if self._room > 0 else None
        if ledger is None:
            return []
        dealt = self._deal(ledger)
        count = dealt.rounds
        taken = [ledger.steps(rank, hand) for rank, hand in enumerate(dealt.hands)]
        every = tuple(-(-steps // count) for steps in taken)
        sync = SyncPoints(
            self.next_round,
            every[0],
            count,
            before,
            sum(every),
            drift=self._wants_drift,
            compare=self.averages == "gradients" and ledger.remaining == 0 and ledger.is_ended,
            inner=self._inner_rounds > 1 and count > 1,
            short=count * every[0] - taken[0],
        )
        times = zip(taken, self._predicted_pace_ms, strict=False)
        predicted_ms = max((steps * ms for steps, ms in times), default=math.inf)
        armed = ArmedRounds(
            self._plan,
            sync,
            ledger.epoch,
            dealt,
            every,
            sum(taken),
            predicted_ms,
        )
        if not self._armed:
            armed.start_ms = now_ms
        self._armed.append(armed)
        self.next_round += count
        return [Send(rank, self._order(armed, rank)) for rank in self._present]

    def _order(self, armed: ArmedRounds, rank: int) -> StartEpoch:
        sync = armed.sync
        order = StartEpoch(
            armed.plan,
            armed.epoch,
            armed.dealt.hands[rank],
            sync,
            metrics=self.epochs.metrics,
            group=self.epochs.of(armed.epoch).groups[rank],
        )
        every = armed.every[rank]
        short = sync.count * every - order.steps
        if (every, short) == (sync.every, sync.short):
            return order
        return replace(order, sync=replace(sync, every=every, short=short))

    def _late_ms(self, armed: ArmedRounds) -> float:
        predicted_ms = armed.predicted_ms
        averaging_ms = self.times.sync_ms
        if armed.sync.inner:
            averaging_ms += self.times.inner_ms * (armed.sync.count - 1)
        return armed.start_ms + averaging_ms + max(LATE_FACTOR * predicted_ms, predicted_ms + LATE_MS)

    # ------------------------------------------------------------------ settling
    def _settle_all(self, now_ms: float) -> list[Command]:
        """Settle the orders that all present ranks have acknowledged."""
        records: list[Command] = []
        while self._armed and self._armed[0].is_acknowledged(self._present):
            held = self._armed.popleft().held(self._present, self._unreported)
            self._unreported.clear()
            records += self._settle(held, now_ms)
        return records

    def _settle(self, held: HeldRounds, now_ms: float) -> list[Command]:
        outcome, works, drifts = held.outcome, held.works, held.drifts
        self._count_back(held)
        for rank, work in enumerate(works):
            self.epochs.record(rank, work)
        self.global_step = outcome.global_step
        self._bad = held.bad | self._bad
        drift = largest_drift(drifts) if drifts else None
        reason = self._measure(held) or reason_of(outcome)
        share = self._changed_shares(self._weights)
        averaging_ms = max(work.sync_ms for work in works)
        epoch = self.epochs.close_round(held.armed.epoch, averaging_ms, drift, held.rounds)
        if outcome.voids:
            self._void()
        if self._armed:
            self._armed[0].start_ms = now_ms
        record = RoundEnded(
            round=outcome.round,
            rounds=held.rounds,
            epoch=epoch,
            global_step=self.global_step,
            steps=tuple(work.steps for work in works),
            samples=tuple(work.samples for work in works),
            wall_ms=now_ms - held.armed.start_ms,
            sync_ms=averaging_ms / held.rounds,
            anchor=self.anchor,
            drift=drift,
            reason=reason,
            param_norm=held.norm,
            share=share,
            **summary(works, held.longest),
        )
        return [record]

    def _void(self) -> None:
        """Take back the orders behind an outcome that voids them."""
        for armed in reversed(self._armed):
            for rank, hand in enumerate(armed.dealt.hands):
                self.epochs.count_back(armed.epoch, rank, hand, 0)
        for rank in set(range(self.world_size)).difference(self._present):
            self.epochs.reassign(rank, self._present)
        self.epochs.rewind()
        self._armed.clear()
        self._plan += 1


class SyncRounds(PlannedRounds):
    """One step of each rank per round. Rounds that are short are armed together, and all are finished."""

    shares: ClassVar[Shares] = "equal"

    def _deal(self, ledger: EpochLedger) -> Dealt:
        room = -(-self._room // len(self._present))
        count = min(self.times.steps_at_once, max(1, ledger.whole_rounds(self._present)), room)
        present = frozenset(self._present)
        quotas = [count if rank in present else 0 for rank in range(self.world_size)]
        return Dealt(count, ledger.deal(quotas, [1.0] * self.world_size))


class SingleRounds(PlannedRounds):
    """Rounds of a single device: some steps each, and no mean, so that a round may end at any step."""

    shares: ClassVar[Shares] = "equal"
    may_hurry: ClassVar[bool] = True

    def _deal(self, ledger: EpochLedger) -> Dealt:
        return Dealt(1, (ledger.deal_to(0, min(self.times.steps_at_once, self._room)),))
