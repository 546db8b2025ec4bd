"""Rounds of one big step (exact): every rank trains its part of a global batch, then all take one step.

The ledger's batches are the global ones. Each is dealt to all ranks at once, split by samples in proportion
to their speed, and the optimizer steps when the gradients of all parts have met: the mathematics of one
device with the big batch. A round in progress is always finished, so that no bit depends on the clock; with
fixed ratios none depends on the measured speeds either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

from flowdp.errors import ProtocolError
from flowdp.machine.armed_rounds import ArmedRounds, Dealt, HeldRounds
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import EpochLedger, Epochs
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Averages, Shares
from flowdp.policy.ledger import ReadLedger
from flowdp.policy.schedule import is_due_at
from flowdp.policy.shares import ThroughputBalance, hinted_weights, part_sizes
from flowdp.policy.sharing import Exclusion, Sharing
from flowdp.protocol.commands import Command, Fail
from flowdp.protocol.messages import Checksum, SampleRange, StartEpoch, SyncAck

__all__ = ["ExactRounds", "split"]

CALIBRATION = 2
"""Measurements before the first split by speed; until then an order is one round."""

LESSON = 8
"""An order that is to teach something soon is this part of another: a probe, shares that move ..."""

TRIAL, TRIAL_WINDOWS = 4, 3
"""... and one of a trial this part, but at least so many windows, if an order has them: the first one fills
caches, and starts the threads that are lent."""

MOVING = 0.05
"""Relative change of a share, from order to order, with which the shares still move."""

LONE_RANK = 0
"""Rank that trains windows alone: it owns all parameters, and the state of the optimizer."""

STEADY = 0.02
"""Relative change of a share up to which the split stays: a part of the same size runs as the same graph, and
as the same compiled code. Devices of one speed differ by less from order to order."""

INTERVAL = 1
"""Orders between two splits. Waiting longer gains nothing on noisy times, and shows a slower rank later."""


FLOOR = 1e-3
"""Least share of a rank: of a large global batch every rank gets a sample, and so stays measured ..."""

FLOOR_PART = 1 / 16
"""... and this part of an equal share, where ranks are many: among a thousand `FLOOR` is a whole one."""


class ExactRounds(PlannedRounds):
    """Rounds of one global batch each, in which the gradients of all ranks are averaged.

    Args:
        config: The run, with the sizes of the global batches and of their parts.
        epochs: Ledgers and tallies, of global batches.
    """

    shares: ClassVar[Shares] = "samples"
    averages: ClassVar[Averages] = "gradients"

    def __init__(self, config: CoordinatorConfig, epochs: Epochs) -> None:
        super().__init__(config, epochs)
        if config.global_batch is None:
            raise ProtocolError(f"exact needs a global batch: {config}")
        ranks = config.world_size
        self._batch = config.global_batch
        self._ratios = config.ratios
        self._balance = ThroughputBalance(
            hinted_weights(ranks, config.cadence.speed_hint),
            calibration=CALIBRATION,
            interval=INTERVAL,
            floor=min(FLOOR, FLOOR_PART / ranks),
            steady=STEADY,
        )
        self._is_warm = False  # the first order was held
        self._is_split = config.ratios is not None
        self._is_moving = False
        is_free = self._batch.may_be_alone and config.ratios is None and ranks > 1
        self._sharing = Sharing() if is_free else None
        self._exclusion = Exclusion(ranks)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Shares of the global batches, 0 of ranks that are left out. Shape (world_size,)."""
        if self._ratios is not None:
            return tuple(self._ratios)
        return self._without(self._exclusion.out)

    def _deal(self, ledger: EpochLedger) -> Dealt:
        # The ledger gives them to rank 0; the share of each rank is in the parts.
        count = min(self.times.steps_at_once if self._is_split else 1, ledger.remaining, self._room)
        alone: int | None = None
        shares, out = self.ratios, self._exclusion.plan()
        if out != self._exclusion.out:
            count, shares = -(-count // LESSON), self._without(out)
        elif self._is_moving:
            count = -(-count // LESSON)
        elif self._sharing is not None and self._is_split:
            is_trial = self._sharing.plan()
            if is_trial:
                count = min(count, max(-(-count // TRIAL), TRIAL_WINDOWS))
            if self._sharing.is_shared == is_trial:
                alone = LONE_RANK
                shares = tuple(float(rank == LONE_RANK) for rank in range(self.world_size))
        batches = ledger.deal_to(0, count)
        sizes = self._sizes(ledger, batches)
        hands = (batches, *((),) * (self.world_size - 1))
        parts = list(zip(*self._parts(sizes, shares), strict=True))
        return Dealt(count if alone is None else 1, hands, parts, alone)

    def _order(self, armed: ArmedRounds, rank: int) -> StartEpoch:
        return StartEpoch(
            armed.plan,
            armed.epoch,
            armed.dealt.hands[0],
            armed.sync,
            metrics=self.epochs.metrics,
            parts=armed.dealt.parts[rank],
            alone=armed.dealt.alone is not None,
        )

    def _has_moved(self, before: float, now: float) -> bool:
        """Whether a share has changed much; that of the smallest part changes nothing."""
        return abs(now - before) > MOVING * before and now * self._batch.size > self._batch.least

    def _without(self, out: Collection[int]) -> tuple[float, ...]:
        """Shares by the measured speeds, 0 of these ranks."""
        return tuple(0.0 if rank in out else share for rank, share in enumerate(self._balance.ratios))

    def _sizes(self, ledger: EpochLedger, batches: Sequence[int]) -> list[int]:
        """Samples of each global batch. Shape (batches,)."""
        whole = self._batch
        if isinstance(ledger, ReadLedger):
            return [ledger.samples.get(number, whole.size) for number in batches]
        assert whole.samples is not None
        return [min(whole.size, whole.samples - number * whole.size) for number in batches]

    def _parts(self, sizes: Sequence[int], shares: Sequence[float]) -> list[tuple[SampleRange, ...]]:
        """The parts of global batches of so many samples. Shape (batches, world_size)."""
        whole = self._batch
        parts = {size: split(size, shares, whole.least, whole.forwards) for size in set(sizes)}
        return [parts[size] for size in sizes]

    @property
    def _weights(self) -> Sequence[float]:
        return self.ratios

    def _count_back(self, held: HeldRounds) -> None:
        # A rank without a sample has taken the step, too.
        alone = held.armed.dealt.alone
        trained = held.rounds if alone is None else held.works[alone].steps
        self.epochs.count_back(held.armed.epoch, 0, held.armed.dealt.hands[0], trained)

    def _void(self) -> None:
        super()._void()
        self._exclusion.dropped()
        if self._sharing is not None:
            self._sharing.dropped()

    def _measure(self, held: HeldRounds) -> str:
        # The first round fills caches that all later ones use, and in some the loss is checked, by the first
        # rank as a rule: their times say nothing about the speeds.
        armed, steps = held.armed, max(work.steps for work in held.works)
        first = armed.sync.global_step + 1
        is_checked = any(map(is_due_at, range(first, first + steps)))
        is_probe = any(held.works[rank].samples for rank in self._exclusion.out)
        if self._is_warm and not is_checked and armed.dealt.alone is None:
            samples, busy_ms = zip(*((work.samples, work.busy_ms) for work in held.works), strict=True)
            before = self._balance.ratios
            self._is_split |= self._balance.update(samples, busy_ms)
            self._is_moving = any(map(self._has_moved, before, self._balance.ratios))
            if self._ratios is None and self._is_split:
                self._exclusion.measured(samples, busy_ms, steps * self._batch.least)
        elif is_probe:
            self._exclusion.dropped()
        if self._is_warm and self._is_split and self._sharing is not None and steps and not is_probe:
            self._sharing.measured(armed.dealt.alone is None, held.longest_ms / steps)
        self._is_warm = True
        reason = super()._measure(held)
        if armed.dealt.alone is not None:
            self.times.sync_ms /= max(1, steps)  # once for all of them
        for rank in self._exclusion.out:
            self.times.pace_ms[rank] = 0.0  # no order waits for it
        return reason

    def _settle(self, held: HeldRounds, now_ms: float) -> list[Command]:
        records = super()._settle(held, now_ms)
        different = _different(held.armed.acks) if held.outcome.compares else []
        if different:
            at = f"after epoch {held.armed.epoch + 1}, global step {self.global_step}"
            names = ", ".join(map(str, different))
            records.append(
                Fail(
                    f"the replicas differ {at}: the parameters of rank {names} are not those of the others. "
                    "A loss or a forward that writes to parameters does so by the device's part of each "
                    "window alone: write to them in Callback.on_step, in the same way on every device. "
                    "Without such code, a device has defective memory"
                )
            )
        return records


def split(
    samples: int, ratios: Sequence[float], least: int = 1, forwards: Sequence[int] | None = None
) -> tuple[SampleRange, ...]:
    """Split a global batch among the ranks.

    Args:
        samples: Samples of the global batch.
        ratios: Shares, in any scale; a rank with 0 has no part. Shape (world_size,).
        least: Fewest samples of a part, where it has any.
        forwards: Most samples of a forward of each rank, where all ranks make each forward together; None:
            each makes its own. Shape (world_size,).

    Returns:
        The part of each rank. Shape (world_size,).
    """
    if forwards is None:
        count, sizes = 0, part_sizes(samples, ratios, least)
    else:
        count, sizes = _equally_many(samples, ratios, least, forwards)
    ranks = tuple(rank for rank, size in enumerate(sizes) if size) if count else ()
    bounds = accumulate(sizes, initial=0)
    by_all = all(sizes)
    return tuple(SampleRange(start, stop, ranks, count, by_all) for start, stop in pairwise(bounds))


def _equally_many(
    samples: int, ratios: Sequence[float], least: int, forwards: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """The fewest forwards of all ranks in which no micro-batch is too large, and the sizes of the parts.

    Where one is enough it is one, with the statistics of the whole global batch, whatever the ratios are.
    """
    for count in range(1, samples + 1):
        most = [count * limit if ratio else 0 for limit, ratio in zip(forwards, ratios, strict=True)]
        sizes = _within(samples, ratios, least * count, most) if samples <= sum(most) else None
        if sizes is not None:
            return count, sizes
    raise ProtocolError(f"{samples} samples do not fit into forwards of {forwards}")


def _within(samples: int, ratios: Sequence[float], least: int, most: Sequence[int]) -> tuple[int, ...] | None:
    """Sizes by the ratios, but none above its limit; None where some would be too small."""
    sizes, open_ranks = list(most), [rank for rank, ratio in enumerate(ratios) if ratio]
    while open_ranks:
        full = sum(most) - sum(most[rank] for rank in open_ranks)
        parts = part_sizes(samples - full, [ratios[rank] for rank in open_ranks], least)
        by_rank = dict(zip(open_ranks, parts, strict=True))
        open_ranks = [rank for rank, size in by_rank.items() if size <= most[rank]]
        if len(open_ranks) == len(by_rank):
            for rank, size in by_rank.items():
                sizes[rank] = size
            break
    return tuple(sizes) if all(size == 0 or size >= min(least, samples) for size in sizes) else None


def _different(acks: dict[int, SyncAck]) -> list[int]:
    """Ranks whose sum is not the most frequent one of their kind of device; where none is, the first."""
    sums = {rank: ack.checksum for rank, ack in sorted(acks.items()) if ack.checksum is not None}
    common: dict[str, Checksum] = {}
    for checksum, _ in Counter(sums.values()).most_common():  # of several, the first
        common.setdefault(checksum.kind, checksum)
    return [rank for rank, checksum in sums.items() if checksum != common[checksum.kind]]
