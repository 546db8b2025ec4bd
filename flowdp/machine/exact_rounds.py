"""Rounds of one big step (exact): every rank trains its part of the same window, then all take one step.

A window is a batch of the ledger's. It is dealt to all ranks at once, split by samples in proportion to their
speed, and the optimizer steps when the gradients of all parts have met: the mathematics of one device with
the big batch. A round in progress is always finished, so that no bit depends on the clock; with fixed ratios
none depends on the measured speeds either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import ClassVar

from flowdp.machine.armed_rounds import ArmedRounds, HeldRounds
from flowdp.machine.epochs import Epochs
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Averages, Shares
from flowdp.policy.ledger import Deal, Ledger
from flowdp.policy.shares import ThroughputBalance, part_sizes, weights_from
from flowdp.protocol.commands import Command, Fail
from flowdp.protocol.messages import Part, StartEpoch, SyncAck

__all__ = ["ExactRounds"]

CALIBRATION = 3
"""Measurements before the first split by speed; until then a block is one round."""

INTERVAL = 1
"""Blocks between two splits. Waiting longer gains nothing on noisy times, and shows a slower rank later."""


FLOOR = 1e-3
"""Least share of a rank: of a window that is large enough every rank gets a sample, and so stays measured."""


class ExactRounds(PlannedRounds):
    """Plans windows ahead and settles them.

    Args:
        epochs: Ledgers and tallies; their batches are windows.
        world_size: Ranks.
        window: Samples of a window.
        samples: Samples of an epoch; the last window has what remains.
        ratios: Fixed shares; None: by measured speed. Shape (world_size,).
        speed_hint: (slow rank, how many times faster the others are), until measured.
        least: Samples of a rank's part of a window, where it has any.
        forwards: Samples of a micro-batch of each rank, where all ranks make each forward together; None:
            each makes its own. Shape (world_size,).
    """

    shares: ClassVar[Shares] = "samples"
    averages: ClassVar[Averages] = "gradients"

    def __init__(
        self,
        epochs: Epochs,
        world_size: int,
        window: int,
        samples: int,
        ratios: Sequence[float] | None = None,
        speed_hint: tuple[int, float] | None = None,
        least: int = 1,
        forwards: Sequence[int] | None = None,
    ) -> None:
        super().__init__(epochs, world_size)
        self._window = window
        self._samples = samples
        self._ratios = ratios
        self._least = least
        self._forwards = forwards
        first = weights_from([0.0] * world_size, speed_hint)
        self._balance = ThroughputBalance(first, calibration=CALIBRATION, interval=INTERVAL, floor=FLOOR)
        self._orders_held = 0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Shares of the windows that are planned next. Shape (world_size,)."""
        return self._balance.ratios if self._ratios is None else tuple(self._ratios)

    def _deal(self, ledger: Ledger) -> tuple[int, Deal]:
        # The windows stand in the hand of rank 0; what of them is whose is in the parts.
        is_split = self._ratios is not None or self._orders_held > CALIBRATION
        count = min(self.times.steps_at_once if is_split else 1, ledger.remaining, self._room)
        nobody = (0,) * (self.world_size - 1)
        return count, ledger.deal((count, *nobody), [1.0] * self.world_size)

    def _order(self, armed: ArmedRounds, rank: int) -> StartEpoch:
        return StartEpoch(
            armed.plan,
            armed.epoch,
            armed.deal[0],
            armed.sync,
            metric=self.epochs.metric,
            parts=tuple(parts[rank] for parts in self._parts(armed.deal[0])),
        )

    def _parts(self, windows: Sequence[int]) -> list[tuple[Part, ...]]:
        """The parts of each window. Shape (windows, world_size)."""
        sizes = [min(self._window, self._samples - window * self._window) for window in windows]
        split = {size: self._split(size) for size in set(sizes)}
        return [split[size] for size in sizes]

    def _split(self, samples: int) -> tuple[Part, ...]:
        count, sizes = 0, part_sizes(samples, self.ratios, self._least)
        if self._forwards is not None:
            count, sizes = self._equally_many(samples, self._forwards)
        ranks = tuple(rank for rank, size in enumerate(sizes) if size) if count else ()
        bounds = accumulate(sizes, initial=0)
        return tuple(Part(start, stop, ranks, count) for start, stop in pairwise(bounds))

    def _equally_many(self, samples: int, most: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The fewest forwards of all ranks in which no micro-batch is too large, and the parts for them.

        Where one is enough it is one, with the statistics of the whole window, whatever the ratios are.
        """
        at_once = self._within(samples, most) if samples <= sum(most) else None
        if at_once is not None:
            return 1, at_once
        for count in range(1, samples + 1):
            sizes = part_sizes(samples, self.ratios, self._least * count)
            if all(size <= count * limit for size, limit in zip(sizes, most, strict=True)):
                break
        return count, sizes

    def _within(self, samples: int, most: Sequence[int]) -> tuple[int, ...] | None:
        """Parts by the ratios, but none above its limit; None where some would be too small."""
        sizes, open_ranks = list(most), list(range(self.world_size))
        while open_ranks:
            full = sum(most) - sum(most[rank] for rank in open_ranks)
            ratios = [self.ratios[rank] for rank in open_ranks]
            parts = dict(zip(open_ranks, part_sizes(samples - full, ratios, self._least), strict=True))
            open_ranks = [rank for rank, size in parts.items() if size <= most[rank]]
            if len(open_ranks) == len(parts):
                for rank, size in parts.items():
                    sizes[rank] = size
                break
        return tuple(sizes) if all(size == 0 or size >= self._least for size in sizes) else None

    @property
    def _wants_comparison(self) -> bool:
        return True

    @property
    def _weights(self) -> Sequence[float]:
        return self.ratios

    def _count_back(self, held: HeldRounds) -> None:
        # A rank without a sample has taken the window's step, too.
        self.epochs.settle(held.armed.epoch, 0, held.armed.deal[0], held.rounds)

    def _measure(self, held: HeldRounds) -> str:
        # The first round builds what all later ones find there: it says nothing about the speeds.
        if self._orders_held > 0:
            works = held.works
            self._balance.update([work.samples for work in works], [work.busy_ms for work in works])
        self._orders_held += 1
        return super()._measure(held)

    def _settle(self, held: HeldRounds, now_ms: float) -> list[Command]:
        records = super()._settle(held, now_ms)
        if held.outcome.compare:
            different = _different(held.armed.acks)
            if different:
                names = ", ".join(map(str, different))
                records.append(
                    Fail(
                        f"the replicas differ after epoch {held.armed.epoch}, "
                        f"global step {self.global_step}: the parameters of rank {names} are not those of "
                        "the others"
                    )
                )
        return records


def _different(acks: dict[int, SyncAck]) -> list[int]:
    """The ranks whose checksum is not the one that most have; where none has the most, rank 0's counts."""
    sums = [acks[rank].checksum for rank in range(len(acks))]
    [(common, _)] = Counter(sums).most_common(1)  # of several, the first
    return [rank for rank, checksum in enumerate(sums) if checksum != common]
