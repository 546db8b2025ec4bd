"""A step's batches, taken from the feed as they come and put together to micro-batches.

A batch that is not there yet does not hold the thread: the worker reads its inbox and asks again, and the
step goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowdp.data.open_feeds import Feed
from flowdp.data.source import Batch, Source
from flowdp.data.trees import Form, concatenated, described, flatten, is_cut, unflatten
from flowdp.machine.worker import Step

__all__ = ["MicroBatch", "MicroBatcher", "joined"]


@dataclass(slots=True)
class MicroBatch:
    """Input of one forward.

    Attributes:
        batch: On the device.
        samples: Number of samples.
        share: Its share of the step, if the step's other micro-batches are as large as its first.
    """

    batch: Batch
    samples: int
    share: float


class MicroBatcher:
    """Groups the batches of a step into micro-batches, one step after another.

    Args:
        feed: Feed of the rank.
        source: Knows how many samples a batch has.
        width: Batches of a micro-batch.

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
    def is_inside(self) -> bool:
        """Whether a step is under way."""
        return self.taken > 0

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
            self._open.append(batch)
            self._sizes.append(self._samples_in(step.epoch, step.batches[self.taken]))
            self.taken += 1
        return True

    def is_last(self, step: Step) -> bool:
        """Whether the last micro-batch ended the step."""
        return self.taken >= len(step.batches) and not self._open

    def end(self, step: Step) -> None:
        """The step is done."""
        if self._source.keeps:
            self._trained += ((step.epoch, batch) for batch in step.batches)
        self.taken = self.samples = 0
        self.micros.clear()

    def settle(self) -> None:
        """A mean was held: all steps so far are in it, or lost for good (those of a bad replica)."""
        if self._trained:
            self._source.settle(self._trained)
            self._trained = []

    def lose(self, rank: int) -> None:
        """Return the batches of a lost rank that no mean holds, so that others train them.

        Args:
            rank: Rank index.
        """
        with suppress(Exception):  # of a device that is dead; its feed asks for nothing more all the same
            self._feed.follow(())
        self._source.reclaim(rank)


def joined(batches: Sequence[Batch], sizes: Sequence[int]) -> Batch:
    """One batch of several, on their device.

    Tensors, arrays and lists as long as their batch are concatenated. All other leaves come
    from the first; where it is no tensor, it must be the same in all of them.

    Args:
        batches: Alike.
        sizes: Samples of each.

    Raises:
        TypeError: They differ in structure, or hold samples in an object that cannot be cut.
        ValueError: Nothing is as long as its batch, tensors do not fit together, or a value differs; samples
            would get lost.
    """
    rows, forms = zip(
        *(flatten(batch, size) for batch, size in zip(batches, sizes, strict=True)), strict=True
    )
    if any(form != forms[0] for form in forms):
        raise TypeError("batches of one step differ in structure, and cannot be put together")
    leaves: list[Any] = []
    is_joined = False
    for place, parts in enumerate(zip(*rows, strict=True)):
        if all(is_cut(part, size) for part, size in zip(parts, sizes, strict=True)):
            leaves.append(_in_a_row(forms[0], place, parts))
            is_joined = True
        elif isinstance(parts[0], Tensor) or all(_is_same(part, parts[0]) for part in parts[1:]):
            leaves.append(parts[0])
        else:
            raise ValueError(
                f"{_shown(forms[0], place, parts)} is not as long as the batch ({sizes[0]} samples), and "
                "differs between batches that make one step: make it a list, array or tensor with one entry "
                "for each sample, or give all devices one batch_size"
            )
    if not is_joined:
        raise ValueError(
            f"nothing in the batch is as long as the batch ({sizes[0]} samples), so batches cannot be put "
            "together to the batch_size of this device; give all devices one batch_size"
        )
    return unflatten(leaves, forms[0])


def _in_a_row(form: Form, place: int, parts: Sequence[Any]) -> Any:
    try:
        return concatenated(parts)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{_shown(form, place, parts)} cannot be put together to the batch_size of this device: {error}. "
            "Let collate_fn make batches that differ in the first dimension alone, or give all devices one "
            "batch_size"
        ) from error


def _shown(form: Form, place: int, parts: Sequence[Any]) -> str:
    return f"batch{list(form.paths())[place]} ({', '.join(map(described, parts))})"


def _is_same(leaf: Any, first: Any) -> bool:
    try:
        return leaf is first or bool(leaf == first)
    except Exception:  # an array has no one answer
        return False
