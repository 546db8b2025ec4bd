"""Planned rounds (sync, cadence, one device): while round k runs, round k + 1 lies ready.

No wake-up of the coordinator is on the critical path: workers find the next order in their inbox. What was
planned is settled when all members have acknowledged; an outcome that voids the rest brings it back to the
ledger, and it is planned anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flowdp.errors import ProtocolError
from flowdp.machine.commands import Command, Hurry, RoundEnded, Send
from flowdp.machine.epochs import Epochs, mean_loss
from flowdp.messages import DataEnded, Fact, StartEpoch, SyncAck, SyncNow, Work
from flowdp.policy.cadence import Cadence
from flowdp.policy.drift import DriftReport
from flowdp.policy.ledger import Deal, Ledger

__all__ = ["Block", "PlannedRounds"]

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


@dataclass(slots=True)
class Block:
    """Rounds that were armed by one order to every rank.

    Attributes:
        plan: Number of the plan.
        sync: `every` is that of rank 0; the other fields hold for all.
        epoch: Epoch of the batches.
        deal: The batches.
        predicted_ms: When it should be over; infinite where nobody knows.
        start_ms: When it began.
        acks: What the ranks have answered.
    """

    plan: int
    sync: SyncNow
    epoch: int
    deal: Deal
    predicted_ms: float
    start_ms: float = math.nan
    acks: dict[int, SyncAck] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """Number of the last of them."""
        return self.sync.round + self.sync.count - 1


class PlannedRounds:
    """Plans rounds ahead and settles them.

    Args:
        epochs: Ledgers and tallies.
        cadence: Quotas of rounds of several steps; None: every round is one step of each rank (sync), or
            there is one device.
        world_size: Ranks.

    Attributes:
        global_step: Steps of all ranks in the rounds held so far.
    """

    def __init__(self, epochs: Epochs, cadence: Cadence | None, world_size: int) -> None:
        self.epochs = epochs
        self.cadence = cadence
        self.world_size = world_size
        self.global_step = 0
        self._blocks: deque[Block] = deque()
        self._plan = 0
        self._round = 0  # of the next block
        self._pace_ms = [0.0] * world_size
        self._sync_ms = 0.0
        self._hurried = -1

    @property
    def is_idle(self) -> bool:
        """Whether no order is out."""
        return not self._blocks

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank in a round."""
        return self.cadence.anchor if self.cadence is not None else 1

    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds."""
        if not isinstance(fact, SyncAck):
            raise ProtocolError(f"planned rounds know no {fact}")
        # A fast rank's answer to the next order may overtake a slow rank's answer to this one.
        block = next((b for b in self._blocks if b.sync.round <= fact.outcome.round <= b.last_round), None)
        if block is None or fact.rank in block.acks:
            raise ProtocolError(f"unexpected {fact}; out are {[b.sync for b in self._blocks]}")
        block.acks[fact.rank] = fact
        records: list[Command] = []
        while self._blocks and len(self._blocks[0].acks) == self.world_size:
            records += self._settle(self._blocks.popleft(), now_ms)
        return records

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten what is out of an epoch.

        The ranks come to the gate without what never existed, so the outcome voids what was armed behind. In
        sync that is the same round at whatever moment this is known.
        """
        cut: set[int] = set()
        for block in self._blocks:
            if block.epoch == end.epoch:
                whole = block.deal
                block.deal = tuple(tuple(batch for batch in hand if batch < end.batches) for hand in whole)
                cut.update(rank for rank, hand in enumerate(whole) if hand != block.deal[rank])
        return [Send(rank, end) for rank in sorted(cut)]

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
        ledger = self.epochs.dealing(now_ms)
        if ledger is None:
            return []
        count, deal = self._deal(ledger)
        step = self._blocks[-1].sync if self._blocks else None
        before = self.global_step if step is None else step.global_step + step.count * step.steps
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
        block = Block(self._plan, sync, ledger.epoch, deal, self._predict_ms(taken))
        if not self._blocks:
            block.start_ms = now_ms
        self._blocks.append(block)
        self._round += count
        return [Send(rank, self._order(block, rank)) for rank in range(self.world_size)]

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

    def _deal(self, ledger: Ledger) -> tuple[int, Deal]:
        """How many rounds to arm, and their batches."""
        if self.cadence is not None:
            return 1, ledger.deal(self.cadence.quotas, self.cadence.ms_per_step)
        pace = self._pace_ms if max(self._pace_ms) else [1.0] * self.world_size
        block = self._block_steps()
        if self.world_size == 1:
            return 1, ledger.deal((block,), pace)
        whole = 0 if any(ledger.left) else ledger.remaining // sum(ledger.groups)
        if whole:
            count = min(block, whole)
            return count, ledger.deal_rounds(count)
        return 1, ledger.deal((1,) * self.world_size, [1.0] * self.world_size)

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
        outcome = block.acks[0].outcome
        rounds = outcome.round - block.sync.round + 1
        works = [block.acks[rank].work for rank in range(self.world_size)]
        for rank, ack in sorted(block.acks.items()):
            if ack.outcome != outcome:
                raise ProtocolError(
                    f"rank {rank} left round {outcome.round} with another outcome: {ack.outcome}"
                )
            self.epochs.settle(block.epoch, rank, block.deal[rank], self._steps_of(rank, ack.work, rounds))
            self.epochs.record(rank, ack.work, wait_ms=ack.wait_ms, sync_ms=ack.sync_ms * rounds)
            if ack.work.pace_ms > 0:
                self._pace_ms[rank] = ack.work.pace_ms
        self.global_step = outcome.global_step
        self._sync_ms = max(ack.sync_ms for ack in block.acks.values())
        drifts = tuple(ack.drift for ack in block.acks.values() if ack.drift is not None)
        drift = DriftReport(drifts).max_drift if drifts else None
        reason = self._measure(works, drifts) or ("hurried" if outcome.hurried else "")
        self.epochs.close_round(block.epoch, self._sync_ms * rounds, drift, rounds)
        if outcome.voids:
            self._void()
        wall_ms = now_ms - block.start_ms
        if self._blocks:
            self._blocks[0].start_ms = now_ms
        record = RoundEnded(
            round=outcome.round,
            rounds=rounds,
            epoch=block.epoch,
            global_step=self.global_step,
            steps=tuple(work.steps for work in works),
            samples=tuple(work.samples for work in works),
            loss=mean_loss(works),
            lr=max(works, key=lambda work: work.steps).lr,
            wall_ms=wall_ms,
            busy_ms=tuple(work.busy_ms for work in works),
            data_ms=tuple(work.data_ms for work in works),
            wait_ms=tuple(block.acks[rank].wait_ms for rank in range(self.world_size)),
            sync_ms=self._sync_ms,
            anchor=self.anchor,
            drift=drift,
            reason=reason,
        )
        return [record]

    def _steps_of(self, rank: int, work: Work, rounds: int) -> int:  # noqa: ARG002
        """Steps of its hand that a rank has taken, as the ledger counts them."""
        return work.steps

    def _measure(self, works: Sequence[Work], drifts: tuple[float, ...]) -> str:
        """Take the measurements of a block; what is to be said about them, or ""."""
        if self.cadence is None:
            return ""
        paces = [work.pace_ms for work in works]
        return self.cadence.measured(paces, [work.steps for work in works], self._sync_ms, drifts or None)

    def _void(self) -> None:
        """Take back what lies armed behind an outcome that voids it."""
        for block in reversed(self._blocks):
            for rank, hand in enumerate(block.deal):
                self.epochs.settle(block.epoch, rank, hand, 0)
        self.epochs.fold()
        self._blocks.clear()
        self._plan += 1
