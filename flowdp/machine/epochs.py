"""The epochs of a run in their order: what can be dealt, what was trained, which one is complete."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowdp.errors import ProtocolError
from flowdp.machine.commands import EpochEnded
from flowdp.messages import Work
from flowdp.policy.ledger import ENDLESS, Ledger
from flowdp.policy.tally import Tally

__all__ = ["Epochs"]


@dataclass(slots=True)
class _Open:
    """An epoch that has begun and is not complete."""

    ledger: Ledger
    tally: Tally
    start_ms: float


class Epochs:
    """Ledgers and tallies of the epochs that are under way; two at most in planned rounds.

    Args:
        batches: Batches of an epoch; None: as many as `end` will say of each.
        epochs: How many; None: until `max_steps`.
        max_steps: Steps of all ranks after which the run ends; None: no limit.
        world_size: Ranks.
        wait_for_metric: The next epoch begins only when the one before is complete, because a scheduler
            waits for its loss.
        groups: Batches that make one step of each rank, all equal with `max_steps`; None: one each. Shape
            (world_size,).

    Attributes:
        done: Complete epochs.
        metric: Loss of the last complete epoch, where a scheduler waits for it; else None.
    """

    def __init__(
        self,
        batches: int | None,
        epochs: int | None,
        max_steps: int | None,
        world_size: int,
        wait_for_metric: bool = False,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.batches = batches
        self.epochs = epochs
        self.max_steps = max_steps
        self.world_size = world_size
        self.wait_for_metric = wait_for_metric
        self.groups = groups
        self.done = 0
        self.metric: float | None = None
        self._open: deque[_Open] = deque()
        self._opened = 0
        self._group = 1 if groups is None else max(groups)
        self._planned = 0  # steps of the opened epochs
        self._ends: dict[int, int] = {}  # what `end` said of epochs that are not open yet

    @property
    def is_complete(self) -> bool:
        """Whether every batch of the run was trained and counted back."""
        return not self._open and self._next_length == 0

    def dealing(self, now_ms: float) -> Ledger | None:
        """The earliest epoch of which something can be dealt; None: nothing now, or nothing ever."""
        for epoch in self._open:
            if epoch.ledger.remaining:
                return epoch.ledger
        if self._open and self.wait_for_metric:
            return None
        length = self._next_length
        if length == 0:
            return None
        self._planned += -(-length // self._group)
        self._ends.pop(self._opened, None)
        ledger = Ledger(self._opened, length, self.world_size, self.groups)
        self._open.append(_Open(ledger, Tally(self._opened, self.world_size), now_ms))
        self._opened += 1
        return ledger

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing will ever be dealt again, unless something comes back."""
        return not any(e.ledger.remaining for e in self._open) and self._next_length == 0

    def of(self, epoch: int) -> Ledger:
        """The ledger of an epoch under way."""
        return self._find(epoch).ledger

    def end(self, epoch: int, batches: int) -> None:
        """Take in how many batches an epoch of unknown length has."""
        if epoch >= self._opened:
            self._ends[epoch] = batches
        elif self._is_open(epoch) and batches < (ledger := self.of(epoch)).batches:
            self._planned -= -(-ledger.batches // self._group) + (-batches // self._group)
            ledger.end(batches)

    def settle(self, epoch: int, rank: int, batches: Sequence[int], steps: int) -> None:
        """Count back what was dealt of an epoch; nothing of one that had ended before it."""
        if batches:
            self.of(epoch).settle(rank, batches, steps)

    def record(self, rank: int, work: Work, wait_ms: float = 0.0, sync_ms: float = 0.0) -> None:
        """Count a rank's work towards its epoch."""
        if work.steps or self._is_open(work.epoch):
            self._find(work.epoch).tally.add(rank, work, wait_ms=wait_ms, sync_ms=sync_ms)

    def close_round(self, epoch: int, sync_ms: float, drift: float | None, rounds: int) -> None:
        """Count rounds towards an epoch; a meeting after the last one counts towards none."""
        if self._is_open(epoch):
            self._find(epoch).tally.close_round(sync_ms, drift, rounds)

    def ended(self, now_ms: float, anchor: int, global_step: int) -> list[EpochEnded]:
        """The epochs that are complete since the last call, in their order."""
        records = []
        while self._open and self._open[0].ledger.is_complete:
            epoch = self._open.popleft()
            metrics = epoch.tally.result(now_ms - epoch.start_ms, anchor, global_step, self.epochs)
            self.done += 1
            self.metric = metrics.loss if self.wait_for_metric else None
            records.append(EpochEnded(metrics))
            if self._open:
                # Its first batches were dealt while the epoch before still ran.
                self._open[0].start_ms = now_ms
        return records

    def fold(self) -> None:
        """Shorten the lists of left-overs."""
        for epoch in self._open:
            epoch.ledger.fold()

    def check(self) -> None:
        """Check the ledgers.

        Raises:
            ProtocolError: A batch is lost or doubled, or the epochs are out of order.
        """
        for number, epoch in enumerate(self._open, self.done):
            epoch.ledger.check()
            if epoch.ledger.epoch != number:
                raise ProtocolError(f"epoch {epoch.ledger.epoch} stands where {number} should")

    @property
    def _next_length(self) -> int:
        """Batches of the epoch that would be opened next."""
        if self.epochs is not None and self._opened >= self.epochs:
            return 0
        length = self._ends.get(self._opened, ENDLESS) if self.batches is None else self.batches
        if self.max_steps is None:
            return length
        return max(0, min(length, (self.max_steps - self._planned) * self._group))

    def _is_open(self, epoch: int) -> bool:
        return self.done <= epoch < self.done + len(self._open)

    def _find(self, epoch: int) -> _Open:
        for candidate in self._open:
            if candidate.ledger.epoch == epoch:
                return candidate
        raise ProtocolError(f"epoch {epoch} is not under way: {[e.ledger.epoch for e in self._open]} are")


def mean_loss(works: list[Work]) -> float:
    """Mean over the samples of several pieces of work; NaN without any."""
    samples = sum(work.losses[1] for work in works)
    return math.fsum(work.losses[0] for work in works) / samples if samples else math.nan
