"""The epochs of a run in order: remaining and trained batches, and the epochs that are complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.policy.ledger import ENDLESS, Ledger, ReadLedger
from flowdp.policy.streams_ledger import StreamsLedger
from flowdp.policy.tally import EpochMetrics, Tally
from flowdp.protocol.messages import BatchRead, DataEnded, Work
from flowdp.protocol.position import OpenEpoch, Position

__all__ = ["EpochLedger", "Epochs"]

EpochLedger = Ledger | StreamsLedger
"""The ledger of an epoch, whether one source serves all ranks or each machine has a stream of its own."""


@dataclass(slots=True)
class _Open:
    """An epoch that has begun and is not complete."""

    ledger: EpochLedger
    tally: Tally
    start_ms: float
    whole: int | None  # full length, ignoring max_steps; None until the reader reaches its end
    spent_ms: float | None = None  # once it is complete

    @property
    def is_cut(self) -> bool:
        """Whether the run's limit leaves a part of it out."""
        return self.whole is None or self.ledger.batches < self.whole


class Epochs:
    """Ledgers and tallies of the epochs that are under way; two at most in planned rounds.

    Args:
        config: The run.

    Attributes:
        opened: Epochs that have begun.
        done: Epochs that are over: complete, or as far as the run's limit goes.
        metrics: Losses of the complete epochs of this run, the last one behind them, where a scheduler waits
            for them, else empty; None: an epoch that it does not see.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.done = 0
        self.metrics: tuple[float | None, ...] = ()
        self._open: deque[_Open] = deque()
        self.opened = 0
        self._cut: list[_Open] = []  # complete ones, from the first that `max_steps` left a part out of
        self._group = max(config.groups or (1,))
        self._planned = 0  # steps of the opened epochs
        self._early: list[tuple[float, float | None, int]] = []  # rounds that count towards the next epoch
        # Ranks of each machine, where each reads a stream of its own; empty: one source serves all.
        self._streams = config.machines if config.batches is None else ()
        # Of epochs that are not complete, where their length is unknown: those that were read, by machine.
        self._ends: dict[int, dict[int, DataEnded]] = {}
        # Batches are dealt when they were read, those of the next epoch may have been read already.
        self._deals_read = config.batches is None and config.global_batch is not None
        self._read: list[BatchRead] = []

    @property
    def is_complete(self) -> bool:
        """Whether every batch of the run was trained and counted back."""
        return not self._open and self._next_length == 0

    @property
    def complete(self) -> int:
        """Complete epochs, up to the first that `max_steps` cut short: with more steps the run enters it."""
        return self.done - len(self._cut)

    def dealing(self, now_ms: float) -> EpochLedger | None:
        """The earliest epoch with batches to deal; None where there are none now, or none will come."""
        for epoch in self._open:
            if epoch.ledger.remaining:
                return epoch.ledger
        waits = self._open and (self.config.wait_for_metric or not self._open[-1].ledger.is_ended)
        if waits or self._is_halted or self._next_length == 0:
            return None
        ledger = self._begin(now_ms).ledger
        return ledger if ledger.remaining else None

    def _begin(self, now_ms: float, dealt: int = 0) -> _Open:
        ledger = self._ledger(max(self._next_length, dealt))
        for end in self._ends.get(self.opened, {}).values():  # those that have been read already
            ledger.end(end.batches, end.machine)
        self._planned += ledger.planned_steps(self._group)
        whole = self._whole(self.opened)
        tally = Tally(self.opened, self.config.world_size)
        for early in self._early:
            tally.close_round(*early)
        self._early.clear()
        self._open.append(_Open(ledger, tally, now_ms, whole))
        self.opened += 1
        return self._open[-1]

    def _ledger(self, length: int) -> EpochLedger:
        """Ledger of the next epoch."""
        if self._deals_read:
            read = ReadLedger(self.opened, length, self.config.world_size)
            for batch in self._read:
                if batch.epoch == self.opened:
                    read.read(batch.batch, batch.samples)
            self._read = [batch for batch in self._read if batch.epoch > self.opened]
            return read
        if not self._streams:
            return Ledger(self.opened, length, self.config.world_size, self.config.groups)
        # Its own count of steps: the last one of each stream may have fewer batches.
        limit = None if self.config.max_steps is None else self.config.max_steps - self._planned
        return StreamsLedger(self.opened, limit, self._streams, self.config.groups)

    def _whole(self, epoch: int) -> int | None:
        """Full length of an epoch, ignoring `max_steps`; None until its end is read."""
        ends = self._ends.get(epoch, {}).values()
        is_known = len(ends) == max(1, len(self._streams))
        return sum(end.batches for end in ends) if is_known else self.config.batches

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing will be dealt before all that is out has met, unless something comes back."""
        return not any(e.ledger.remaining for e in self._open) and (self._is_halted or self._next_length == 0)

    @property
    def _is_halted(self) -> bool:
        return bool(self._open) and self.config.tasks.halts(self._open[-1].ledger.epoch)

    @property
    def is_inside(self) -> bool:
        """Whether some batches of an epoch were trained and others not."""
        return any(one.ledger.trained for one in (*self._cut, *self._open))

    def position(self, now_ms: float) -> tuple[int, int, tuple[OpenEpoch, ...]]:
        """Number of complete epochs, their steps, and positions of the others; nothing is dealt."""
        open_ = [*self._cut, *self._open]
        planned = self._planned - sum(one.ledger.planned_steps(self._group) for one in open_)
        return self.complete, planned, tuple(_standing(one, now_ms) for one in open_)

    def resume(self, position: Position) -> None:
        """Begin where another run stood; before anything else, and `start` follows.

        Where this run's limits lie before that, the batches dealt by then are trained, and no more.
        """
        self.done = self.opened = position.done
        self._planned = position.planned
        self.metrics = (position.metric,) if self.config.wait_for_metric else ()
        for stood in position.open:
            if stood.position == self._next_length == 0:
                return
            one = self._begin(-stood.spent_ms, stood.position)
            one.ledger.resume(stood.position, stood.left)
            for rank, sums in enumerate(stood.sums):
                one.tally.add(rank % self.config.world_size, sums)
            one.tally.close_round(stood.sync_ms, stood.divergence, stood.rounds)

    def start(self, now_ms: float) -> None:
        """The ranks are ready: the clocks of resumed epochs go on from now."""
        for one in self._open:
            one.start_ms += now_ms

    def reassign(self, rank: int, ranks: Sequence[int]) -> None:
        """Give the left-overs of a rank that is gone to other ranks."""
        for one in self._open:
            one.ledger.reassign(rank, ranks)

    def of(self, epoch: int) -> EpochLedger:
        """The ledger of an epoch under way."""
        return self._find(epoch).ledger

    def read(self, batch: BatchRead) -> None:
        """Take in a batch that can be dealt from now on."""
        if batch.epoch >= self.opened:
            self._read.append(batch)
        elif batch.epoch >= self.done:
            ledger = self.of(batch.epoch)
            assert isinstance(ledger, ReadLedger)
            ledger.read(batch.batch, batch.samples)

    def end(self, end: DataEnded) -> str | None:
        """Take in how many batches an epoch of unknown length has.

        Returns:
            An error, where machines that read the whole of it have read another number; else None.
        """
        if end.epoch < self.done:
            return None
        ends = self._ends.setdefault(end.epoch, {})
        ends[end.machine] = end
        for machine, other in ends.items():
            if other.read != end.read:
                return (
                    f"epoch {end.epoch + 1} has {other.read} batches on machine {machine}, {end.read} on "
                    f"machine {end.machine}: each reads the whole IterableDataset and trains its part, so it "
                    "must yield the same in the same order on all: give its random numbers a seed; one that "
                    "splits itself by machine is for MachineOptions(stream='part')"
                )
        if end.epoch < self.opened:
            one = self._find(end.epoch)
            one.whole = self._whole(end.epoch)
            planned = one.ledger.planned_steps(self._group)
            one.ledger.end(end.batches, end.machine)
            self._planned += one.ledger.planned_steps(self._group) - planned
        return None

    def count_back(self, epoch: int, rank: int, batches: Sequence[int], steps: int) -> None:
        """Count back dealt batches of an epoch; none where it ended before them."""
        if batches:
            self.of(epoch).count_back(rank, batches, steps)

    def record(self, rank: int, work: Work) -> None:
        """Count a rank's work towards its epoch."""
        if work.steps or self._is_open(work.epoch):
            self._find(work.epoch).tally.add(rank, work)

    def close_round(self, epoch: int, sync_ms: float, drift: float | None, rounds: int) -> int:
        """Count rounds towards an epoch or, if it has been reported, towards the next one; returns which."""
        epoch = max(epoch, self.done)
        if self._is_open(epoch):
            self._find(epoch).tally.close_round(sync_ms, drift, rounds)
        else:
            self._early.append((sync_ms, drift, rounds))
        return epoch

    def ended(
        self, now_ms: float, anchor: int, global_step: int, *, is_idle: bool = True
    ) -> list[EpochMetrics]:
        """The records of the epochs that are complete since the last call, in their order.

        Args:
            now_ms: The time.
            anchor: Steps of the slowest rank in a round.
            global_step: Steps of all ranks so far.
            is_idle: No round is out. One that is belongs to the last epoch, if none begins beside it.
        """
        records = []
        while self._open and self._open[0].ledger.is_complete:
            if not is_idle and len(self._open) == 1 and self.is_exhausted:
                break
            epoch = self._open.popleft()
            self._ends.pop(epoch.ledger.epoch, None)
            if epoch.is_cut or self._cut:
                self._cut.append(epoch)
            metrics = epoch.tally.result(
                now_ms - epoch.start_ms, anchor, global_step, self.config.epochs, is_complete=not epoch.is_cut
            )
            self.done += 1
            if self.config.wait_for_metric:
                self.metrics = (*self.metrics, metrics.loss)
            epoch.spent_ms = metrics.epoch_ms
            records.append(metrics)
            if self._open:
                # Its first batches were dealt while the epoch before still ran.
                self._open[0].start_ms = now_ms
        return records

    def watch(self, metric: float | None) -> None:
        """Show a scheduler another loss of the last complete epoch; None: it does not see this epoch."""
        self.metrics = (*self.metrics[:-1], metric)

    def rewind(self) -> None:
        """Take back left-overs from the positions; see `Ledger.rewind`."""
        for epoch in self._open:
            epoch.ledger.rewind()

    @property
    def _next_length(self) -> int:
        """Batches of the epoch that would be opened next."""
        if self.config.epochs is not None and self.opened >= self.config.epochs:
            return 0
        whole = self._whole(self.opened)
        length = ENDLESS if whole is None else whole
        if self.config.max_steps is None:
            return length
        return max(0, min(length, (self.config.max_steps - self._planned) * self._group))

    def _is_open(self, epoch: int) -> bool:
        return self.done <= epoch < self.done + len(self._open)

    def _find(self, epoch: int) -> _Open:
        for candidate in self._open:
            if candidate.ledger.epoch == epoch:
                return candidate
        raise ProtocolError(f"epoch {epoch} is not under way: {[e.ledger.epoch for e in self._open]} are")


def _standing(one: _Open, now_ms: float) -> OpenEpoch:
    ledger, tally = one.ledger, one.tally
    if ledger.dealt:
        raise ProtocolError(
            f"epoch {ledger.epoch}: {ledger.dealt} batches are out while all shall stand still"
        )
    return OpenEpoch(
        epoch=ledger.epoch,
        position=ledger.position,
        left=tuple(map(tuple, ledger.left)),
        sums=tuple(tally.ranks),
        rounds=tally.rounds,
        sync_ms=tally.sync_ms,
        divergence=tally.divergence,
        spent_ms=now_ms - one.start_ms if one.spent_ms is None else one.spent_ms,
    )
