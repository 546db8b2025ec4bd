"""Planned rounds (sync, cadence, one device): while round k runs, round k + 1 lies ready.

No wake-up of the coordinator is on the critical path: workers find the next order in their inbox. What was
planned is settled when all members have acknowledged; an outcome that voids the rest brings it back to the
ledger, and it is planned anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from flowdp.errors import ProtocolError
from flowdp.machine.armed_rounds import Block
from flowdp.machine.epochs import Epochs
from flowdp.machine.round_record import rebalanced, round_ended, why
from flowdp.policy.cadence import Cadence
from flowdp.policy.drift import DriftReport
from flowdp.policy.ledger import Deal, Ledger
from flowdp.protocol.commands import Command, Hurry, Send
from flowdp.protocol.messages import DataEnded, Fact, StartEpoch, SyncAck, SyncNow, Work
from flowdp.protocol.position import Position

__all__ = ["PlannedRounds"]

AHEAD = 2
"""Orders per rank that are out: the one that runs and the next."""

BLOCK_MS = 200.0
"""Rounds of one step, and the steps of a single device, are armed in blocks of about this time ..."""

BLOCK_STEPS = 500
"""... and of at most this many steps per rank."""

LATE_FACTOR = 1.25
"""A round that takes longer than this times its prediction is hurried ..."""

LATE_MS = 20.0
"""... if that is at least this much longer, so that noise does not shorten rounds of a few milliseconds."""

DRIFT_EVERY = 4
"""Where averaging takes more than `DRIFT_SHARE` of a round, the drift is measured in every fourth round."""

DRIFT_SHARE = 0.02


class PlannedRounds:
    """Plans rounds ahead and settles them.

    Args:
        epochs: Ledgers and tallies.
        cadence: Quotas of rounds of several steps; None: every round is one step of each rank (sync), or
            there is one device.
        world_size: Ranks.

    Attributes:
        global_step: Steps of all ranks in the rounds held so far.
        limit: Nothing is armed from this global step on; None: no limit.
        bad: Ranks that had NaN or inf parameters in the last rounds held -> (epoch, batch) where that began,
            if known. Consumed by the coordinator.
    """

    def __init__(self, epochs: Epochs, cadence: Cadence | None, world_size: int) -> None:
        self.epochs = epochs
        self.cadence = cadence
        self.world_size = world_size
        self.global_step = 0
        self.limit: int | None = None
        self.bad: dict[int, tuple[int, int] | None] = {}
        self._present = list(range(world_size))
        self._untold: dict[int, int] = {}  # of ranks that are gone
        self._blocks: deque[Block] = deque()
        self._plan = 0
        self._round = 0  # of the next block
        self._pace_ms = [0.0] * world_size
        self._sync_ms = 0.0
        self._hurried = -1
        self._told_share: tuple[float, ...] = (1.0 / world_size,) * world_size

    @property
    def is_idle(self) -> bool:
        """Whether no order is out."""
        return not self._blocks

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank in a round."""
        return self.cadence.anchor if self.cadence is not None else 1

    @property
    def wants_meeting(self) -> bool:
        """Whether the ranks must meet before anything else: they always do, at the end of the round."""
        return False

    @property
    def next_round(self) -> int:
        """Number of the next round, where no order is out."""
        return self._round

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        if self.cadence is not None and self.cadence.el_che.is_calibrated:
            return self.cadence.el_che.ms_per_batch
        return tuple(self._pace_ms)

    def resume(self, position: Position) -> None:
        """Begin where another run stood; what it measured counts where the ranks are as many."""
        self.global_step, self._round = position.global_step, position.round
        if position.world_size == self.world_size and len(position.pace_ms) == self.world_size:
            self._pace_ms = list(position.pace_ms)
            if self.cadence is not None and position.anchor is not None:
                self.cadence.restore(position.anchor, position.pace_ms, position.drifts)

    def leave(self, rank: int, untold: int, now_ms: float) -> list[Command]:
        """A rank is gone, and with it what it did since the last mean: that is dealt to the others.

        It takes no part in the round that runs, and its going voids what is armed behind.

        Args:
            rank: Who.
            untold: Samples of it that means hold and no acknowledgment has told of.
            now_ms: The time.
        """
        self._present.remove(rank)
        self._untold[rank] = untold
        self._pace_ms[rank] = 0.0
        if self.cadence is not None:
            self.cadence.leave(rank)
        records = self._settle_all(now_ms)
        if not self._blocks:
            self.epochs.disown(rank, self._present)
        return records

    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds."""
        if not isinstance(fact, SyncAck):
            raise ProtocolError(f"planned rounds know no {fact}")
        # A fast rank's answer to the next order may overtake a slow rank's answer to this one.
        block = next((b for b in self._blocks if b.sync.round <= fact.outcome.round <= b.last_round), None)
        if block is None or fact.rank in block.acks or fact.rank not in self._present:
            raise ProtocolError(f"unexpected {fact}; out are {[b.sync for b in self._blocks]}")
        block.acks[fact.rank] = fact
        return self._settle_all(now_ms)

    def _settle_all(self, now_ms: float) -> list[Command]:
        """Settle what all ranks that are here have acknowledged."""
        records: list[Command] = []
        while self._blocks and self._blocks[0].acks.keys() >= set(self._present):
            records += self._settle(self._blocks.popleft(), now_ms)
        return records

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten what is out of an epoch.

        The ranks come to the gate without what never existed, so the outcome voids what was armed behind. In
        sync that is the same round at whatever moment this is known.
        """
        cut = {rank for block in self._blocks for rank in block.shorten(end)}
        return [Send(rank, end) for rank in self._present if rank in cut]

    def decide(self, now_ms: float, *, hold: bool, meet: bool) -> list[Command]:  # noqa: ARG002
        """Arm what may be armed.

        Args:
            now_ms: The time.
            hold: Nothing new, and the round that runs shall end at the next step boundary: the user wants to
                stop or to stand still.
            meet: All ranks shall meet soon; they do at the end of this round anyway.
        """
        commands: list[Command] = []
        while not hold and self._may_arm():
            orders = self._arm(now_ms)
            if not orders:
                break
            commands += orders
        if self._blocks and self._may_hurry():
            block = self._blocks[0]
            if self._hurried < block.last_round and (hold or now_ms >= self._late_ms(block)):
                self._hurried = block.last_round
                commands.append(Hurry(block.last_round))
        return commands

    def deadline_ms(self) -> float | None:
        """When `decide` wants to be asked again: the round that runs is late then."""
        if not self._blocks or not self._may_hurry() or self._hurried >= self._blocks[0].last_round:
            return None
        late = self._late_ms(self._blocks[0])
        return None if math.isinf(late) else late

    def check(self) -> None:
        """Check that what is out is what the ledgers say.

        Raises:
            ProtocolError: It is not.
        """
        out: dict[int, int] = {}
        for block in self._blocks:
            out[block.epoch] = out.get(block.epoch, 0) + sum(map(len, block.deal))
        for epoch, batches in out.items():
            if batches and self.epochs.of(epoch).dealt != batches:
                raise ProtocolError(f"epoch {epoch}: {batches} batches are out, the ledger says otherwise")
        if len(self._blocks) > AHEAD:
            raise ProtocolError(f"{len(self._blocks)} orders are out, {AHEAD} may be")

    # ------------------------------------------------------------------ planning
    def _may_arm(self) -> bool:
        # The first block measures: what follows it waits for the measurement.
        known = self.cadence.is_known if self.cadence is not None else max(self._pace_ms) > 0
        return len(self._blocks) < (AHEAD if known else 1)

    def _arm(self, now_ms: float) -> list[Command]:
        step = self._blocks[-1].sync if self._blocks else None
        before = self.global_step if step is None else step.global_step + step.count * step.steps
        room = BLOCK_STEPS * self.world_size if self.limit is None else self.limit - before
        ledger = self.epochs.dealing(now_ms) if room > 0 else None
        if ledger is None:
            return []
        count, deal = self._deal(ledger, room)
        taken = [ledger.steps(rank, hand) for rank, hand in enumerate(deal)]
        sync = SyncNow(
            self._round,
            taken[0] // count,
            count,
            before,
            sum(taken) // count,
            drift=self._wants_drift(count),
            compare=self._wants_comparison(ledger),
        )
        every = tuple(steps // count for steps in taken)
        block = Block(self._plan, sync, ledger.epoch, deal, every, self._predict_ms(taken))
        if not self._blocks:
            block.start_ms = now_ms
        self._blocks.append(block)
        self._round += count
        return [Send(rank, self._order(block, rank)) for rank in self._present]

    def _order(self, block: Block, rank: int) -> StartEpoch:
        sync = block.sync
        order = StartEpoch(
            block.plan,
            block.epoch,
            block.deal[rank],
            sync,
            metric=self.epochs.metric,
            group=self.epochs.of(block.epoch).groups[rank],
        )
        every = order.steps // sync.count
        return order if every == sync.every else replace(order, sync=replace(sync, every=every))

    def _deal(self, ledger: Ledger, room: int) -> tuple[int, Deal]:
        """How many rounds to arm, and their batches.

        Args:
            ledger: Of the epoch.
            room: Steps of all ranks after which the ranks shall stand still, at least 1.
        """
        if self.cadence is not None:
            return 1, ledger.deal(self.cadence.quotas, self.cadence.ms_per_step, self.cadence.due)
        pace = self._pace_ms if max(self._pace_ms) else [1.0] * self.world_size
        block = self._block_steps()
        if self.world_size == 1:
            return 1, ledger.deal((min(block, room),), pace)
        ranks = self._present
        whole = 0 if any(ledger.left) else ledger.remaining // sum(ledger.groups[rank] for rank in ranks)
        if whole:
            count = min(block, whole, -(-room // len(ranks)))
            return count, ledger.deal_rounds(count, ranks)
        quotas = tuple(int(rank in ranks) for rank in range(self.world_size))
        return 1, ledger.deal(quotas, [1.0] * self.world_size)

    def _block_steps(self) -> int:
        """Rounds of one step to arm at once."""
        slowest = max(self._pace_ms)
        return 1 if slowest == 0 else min(BLOCK_STEPS, max(1, int(BLOCK_MS / (slowest + self._sync_ms))))

    def _predict_ms(self, steps: Sequence[int]) -> float:
        """When the round should be over; infinite as long as nobody knows."""
        if self.cadence is None or not self.cadence.el_che.is_calibrated:
            return math.inf
        measured = self.cadence.el_che.ms_per_batch
        slowest = max(measured)
        return max(count * (ms or slowest) for count, ms in zip(steps, measured, strict=True))

    def _wants_drift(self, count: int) -> bool:
        if self.cadence is None or self.world_size == 1 or count > 1:
            return False
        cheap = self._sync_ms <= DRIFT_SHARE * self.cadence.round_ms
        return cheap or self._round % DRIFT_EVERY == 0

    def _wants_comparison(self, ledger: Ledger) -> bool:  # noqa: ARG002
        return False

    def _may_hurry(self) -> bool:
        # In sync a round in progress is always finished, so that the bits do not depend on the clock.
        return self.cadence is not None or self.world_size == 1

    def _late_ms(self, block: Block) -> float:
        return (
            block.start_ms
            + self._sync_ms
            + max(LATE_FACTOR * block.predicted_ms, block.predicted_ms + LATE_MS)
        )

    # ------------------------------------------------------------------ settling
    def _settle(self, block: Block, now_ms: float) -> list[Command]:
        outcome = block.outcome(self._present)
        rounds = outcome.round - block.sync.round + 1
        works = [block.work(rank, outcome, self._untold.pop(rank, 0)) for rank in range(self.world_size)]
        waits = [block.acks[rank].wait_ms if rank in block.acks else 0.0 for rank in range(self.world_size)]
        self._sync_ms = max(ack.sync_ms for ack in block.acks.values())
        for rank, work in enumerate(works):
            self.epochs.settle(block.epoch, rank, block.deal[rank], self._steps_of(rank, work, rounds))
            sync_ms = block.acks[rank].sync_ms * rounds if rank in block.acks else 0.0
            self.epochs.record(rank, work, wait_ms=waits[rank], sync_ms=sync_ms)
            if work.pace_ms > 0 and rank in self._present:
                self._pace_ms[rank] = work.pace_ms
        self.global_step = outcome.global_step
        late = block.late
        self.bad = {rank: works[rank].bad for rank in (*outcome.bad, *late)} | self.bad
        # A mean of one replica is that replica: a distance of 0 would tell the guard that all is well.
        givers = [rank for rank in outcome.members if outcome.samples[rank] and rank not in late]
        measured = (ack.drift for ack in block.acks.values() if len(givers) > 1)
        drifts = tuple(drift for drift in measured if drift is not None)
        drift = DriftReport(drifts).max_drift if drifts else None
        norm = next((ack.norm for ack in block.acks.values() if ack.norm is not None), None)
        reason = self._measure(works, drifts) or why(outcome)
        share = rebalanced(self._told_share, self._shares())
        self._told_share = share or self._told_share
        epoch = self.epochs.close_round(block.epoch, self._sync_ms * rounds, drift, rounds)
        if outcome.voids:
            self._void()
        wall_ms = now_ms - block.start_ms
        if self._blocks:
            self._blocks[0].start_ms = now_ms
        record = round_ended(
            [[work] for work in works],
            round=outcome.round,
            rounds=rounds,
            epoch=epoch,
            global_step=self.global_step,
            steps=[work.steps for work in works],
            samples=[work.samples for work in works],
            lr=max((ack.work for _, ack in sorted(block.acks.items())), key=lambda work: work.steps).lr,
            wall_ms=wall_ms,
            wait_ms=waits,
            sync_ms=self._sync_ms,
            anchor=self.anchor,
            drift=drift,
            reason=reason,
            param_norm=norm,
            share=share,
        )
        return [record]

    def _steps_of(self, rank: int, work: Work, rounds: int) -> int:  # noqa: ARG002
        """Steps of its hand that a rank has taken, as the ledger counts them."""
        return work.steps

    def _measure(self, works: Sequence[Work], drifts: tuple[float, ...]) -> str:
        """Take the measurements of a block; what is to be said about them, or ""."""
        if self.cadence is None:
            return ""
        paces = [work.pace_ms if rank in self._present else 0.0 for rank, work in enumerate(works)]
        return self.cadence.measured(paces, [work.steps for work in works], self._sync_ms, drifts or None)

    def _shares(self) -> Sequence[float]:
        """Weights of the ranks in the rounds to come; all equal where every rank takes one step."""
        if self.cadence is not None and self.cadence.el_che.is_calibrated:
            return self.cadence.quotas
        return self._told_share

    def _void(self) -> None:
        """Take back what lies armed behind an outcome that voids it."""
        for block in reversed(self._blocks):
            for rank, hand in enumerate(block.deal):
                self.epochs.settle(block.epoch, rank, hand, 0)
        for rank in set(range(self.world_size)).difference(self._present):
            self.epochs.disown(rank, self._present)
        self.epochs.fold()
        self._blocks.clear()
        self._plan += 1
