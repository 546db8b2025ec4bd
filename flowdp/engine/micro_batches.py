"""A step's batches, taken from the feed as they come and put together to micro-batches.

A batch that is not there yet does not hold the thread: the worker reads its inbox and asks again, and the
step goes on where it was.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from flowdp.data.batches import joined
from flowdp.data.feed import Feed
from flowdp.data.source import Batch, Source
from flowdp.device.gathered import made
from flowdp.machine.worker import Step

__all__ = ["MicroBatch", "MicroBatcher", "joined"]


@dataclass(slots=True)
class MicroBatch:
    """Input of one forward.

    Attributes:
        batch: On the device; a `Gathered` where it is still to be made.
        samples: Number of samples.
        share: Its share of the step, if the step's other micro-batches are as large as its first.
    """

    batch: Batch
    samples: int
    share: float


class MicroBatcher:
    """Groups the batches of a step into micro-batches of `width` batches, one step after another.

    Attributes:
        taken: Batches of the step under way so far.
        samples: Samples in the micro-batches handed on.
        micros: Micro-batches handed on, kept while the step may have to begin again.
    """

    def __init__(self, feed: Feed, source: Source, width: int = 1) -> None:
        self.taken = 0
        self.samples = 0
        self.micros: list[MicroBatch] = []
        self._feed = feed
        self._samples_in = source.samples_in
        self._source = source
        self._width = width
        self._open: list[Batch] = []  # of them, those of the next micro-batch
        self._sizes: list[int] = []  # samples of each
        self._planned = 0  # samples of the step, if all micro-batches were as large as the first
        self._trained: list[
            tuple[int, int]
        ] = []  # batches that no mean holds yet, where the source keeps them

    @property
    def factor(self) -> float:
        """Factor that makes the step's shares sum to 1."""
        return self._planned / self.samples

    def next(self, step: Step) -> MicroBatch | None:
        """The next micro-batch of the step; None where a batch of it is not there yet.

        Args:
            step: The one under way, or a new one. Its end may have been cut off meanwhile.

        Raises:
            DataError: See `Feed.take`.
        """
        batches, at = step.batches, self.taken
        if self._width == 1 or (at + 1 == len(batches) and not self._open):
            batch = self._feed.take(step.epoch, batches[at], step.part)
            if batch is None:
                return None
            part = step.part
            samples = self._samples_in(step.epoch, batches[at]) if part is None else part.samples
            self.taken = at + 1
        elif not self._fill(step):
            return None
        else:
            batch, samples = joined(self._open, self._sizes), sum(self._sizes)
            self._open.clear()
            self._sizes.clear()
        if not self.samples:
            self._planned = samples if len(batches) == 1 else samples * -(-len(batches) // self._width)
        self.samples += samples
        micro = MicroBatch(batch, samples, samples / self._planned)
        self.micros.append(micro)
        return micro

    def _fill(self, step: Step) -> bool:
        """Take the batches of a micro-batch; False where one is not there yet."""
        while self.taken < len(step.batches) and len(self._open) < self._width:
            batch = self._feed.take(step.epoch, step.batches[self.taken])
            if batch is None:
                return False
            self._open.append(made(batch))
            self._sizes.append(self._samples_in(step.epoch, step.batches[self.taken]))
            self.taken += 1
        return True

    def is_last(self, step: Step) -> bool:
        """Whether the last micro-batch ended the step."""
        return self.taken >= len(step.batches) and not self._open

    def end(self, step: Step) -> None:
        """End the step."""
        if self._source.keeps:
            self._trained += ((step.epoch, batch) for batch in step.batches)
        self.taken = self.samples = 0
        self.micros.clear()

    def settle(self) -> None:
        """Settle all steps so far: a mean holds them, or they are lost for good (those of a bad replica)."""
        if self._trained:
            self._source.settle(self._trained)
            self._trained = []

    def lose(self, rank: int) -> None:
        """Return the batches of a lost rank that no mean holds, so that others train them."""
        with suppress(Exception):  # of a device that is dead; its feed asks for nothing more all the same
            self._feed.follow(())
        self._source.reclaim(rank)
