"""Reading an IterableDataset: the number of its batches is known when its iterator ends, and not before.

Batches are dealt as though an epoch had no end. When the reader finds it, the coordinator takes back the
batches that were dealt beyond; a rank that waits there is told, and until then its waiting only makes the
reader go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from flowdp.data.epoch_order import ALL, KEPT_EPOCHS
from flowdp.data.identity import Identity, content_checksum
from flowdp.data.loader_source import LoaderSource, ReadPlan
from flowdp.data.source import Batch
from flowdp.device.trees import batch_length
from flowdp.errors import CheckpointError, DataError
from flowdp.policy.formats import format_error

__all__ = ["Counted", "Measured", "StreamReader"]

Collate = Callable[[Any], Batch]

_END = object()
"""An iterator's answer at its end."""

HEAD = 1024
"""Numbers of each tensor of a batch that its checksum is taken of."""

log = logging.getLogger("flowdp")


class StreamReader(LoaderSource):
    """Reads an IterableDataset anew in each epoch, which ends where its iterator ends.

    The worker processes live through all epochs. Where the dataset has `set_epoch`, that is called before
    each, in this process; a worker process's view of it must lie in shared memory.

    Of several machines, number m of M reads all, and trains the batches m, m + M, m + 2 M, ... of the stream;
    or it trains all that its own part of the stream yields, and these have the same numbers.

    A run that is resumed inside an epoch reads that from its beginning, and drops the batches that are
    trained. They must be the same again, in the same order, so a dataset that draws random numbers seeds
    them; where the epochs differ it has `set_epoch`, for it is then iterated for the first time. Checksums
    of the first numbers of each batch tell whether they are.

    Args:
        dataset: Dataset to iterate.
        batch_size: Samples of a batch; None: each item is a batch.
        plan: Epochs to read.
        collate_fn: Makes a batch of the list of its samples, or of the item.
        num_workers: Processes that read.
        loader: Further arguments of `LoaderSource`.

    Raises:
        CheckpointError: Part of an epoch is trained already, and there are several machines.
        OptionError: A fraction of the epoch is to be read.
    """

    checks_orders = True

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None,
        plan: ReadPlan,
        *,
        collate_fn: Collate,
        num_workers: int = 0,
        **loader: Any,
    ) -> None:
        self.can_resume_inside = plan.stride == ALL
        for epoch in plan.start.open:
            if len(epoch.missing) < epoch.position and not self.can_resume_inside:
                raise CheckpointError(
                    f"the checkpoint lies inside epoch {epoch.epoch + 1}, and {type(dataset).__name__} is an "
                    "IterableDataset, which several machines cannot enter in the middle: resume from a "
                    "checkpoint at the end of an epoch, or on one machine, or give a map-style dataset"
                )
        super().__init__(
            None,
            plan,
            is_counted=True,
            dataset=dataset,
            batch_size=batch_size or 1,
            collate_fn=Measured(collate_fn) if batch_size is None else Counted(collate_fn),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            **loader,
        )
        self._most = plan.limit.of_unknown
        self.batch_size = batch_size
        self.is_part = plan.is_part
        self._lengths: dict[int, int] = {}  # of the epochs that have been read to their end; under the lock
        # Of the epochs read last: checksums of their first batch, their first two, ... The reader appends.
        self._sums: dict[int, list[int]] = {}

    def indices(self, _epoch: int, _batch: int) -> tuple[int, ...]:  # samples have no number
        """Nothing; see `Source.indices`."""
        return ()

    def checksum(self, epoch: int, batches: int = 0) -> int | None:
        """See `Source.checksum`."""
        sums = self._sums.get(epoch, ())
        return sums[batches - 1] if 0 < batches <= len(sums) else None

    def identity(self) -> Identity:
        """See `Source.identity`: the first item is read, and of a dataset that splits itself they differ."""
        dataset = self._loader.dataset
        try:
            self._set_epoch(self.plan.start.done)
            items = iter(dataset)
            first = next(items, None)
            if isinstance(items, Generator):
                items.close()
        except Exception as error:
            raise DataError(
                f"reading the first item of {type(dataset).__name__} failed: {format_error(error)}"
            ) from error
        checksum = content_checksum(first)
        if self.is_part:
            return Identity(None, self.batches, self.batch_size, part=checksum)
        return Identity(None, self.batches, self.batch_size, first=checksum)

    @property
    def _name(self) -> str:
        dataset = self._loader.dataset
        return type(getattr(dataset, "iterable", dataset)).__name__

    def _comes(self, rank: int, key: tuple[int, ...]) -> bool:
        epoch, batch = key
        return batch < self._lengths.get(epoch, batch + 1) and super()._comes(rank, key)

    def _begin(self) -> None:
        if self._loader.num_workers:  # else the reader thread alone touches the dataset
            self._iterator = self._iterate(self.plan.start.done)

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        self._set_epoch(epoch)
        return iter(self._loader)

    def _set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self._loader.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _feed(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        for epoch in self.plan.numbers():
            if not self._may_read(epoch):
                return
            # A part has the numbers of its stride, and not those between.
            first, step = self.stride if self.is_part else ALL
            batch = first
            self._reading = (epoch, batch)
            position, missing = self.plan.start.remaining(epoch) or (0, ())
            if self._iterator is None:
                self._iterator = self._in_turn(partial(self._iterate, epoch))
            while self._most is None or batch < self._most:
                read = self._in_turn(partial(next, self._iterator, _END))
                if read is _END:
                    break
                self._note(epoch, batch, read, position)
                is_trained = batch < position and batch not in missing
                if self.stride.has(batch) and not is_trained:
                    yield (epoch, batch), read
                elif self._closing:
                    return
                batch += step
                self._reading = (epoch, batch)
            self._iterator = None
            if batch < position:
                self._check_trained(epoch, None, position)
            self._end(epoch, batch, is_empty=batch == first)

    def _note(self, epoch: int, batch: int, read: tuple[int, Batch], position: int) -> None:
        """Take a batch's checksum, compare it where the trained part of the epoch ends, and report the batch.

        Raises:
            DataError: The trained batches were others.
        """
        sums = self._sums.setdefault(epoch, [])
        sums.append(content_checksum(read[1], sums[-1] if sums else 0, HEAD))
        self._sums.pop(epoch - KEPT_EPOCHS, None)
        if batch + 1 == position:
            log.info("epoch %d: read again up to batch %d, where the run goes on", epoch + 1, position)
            self._check_trained(epoch, sums[-1], position)
        if self._on_read is not None:
            self._on_read(epoch, batch, read[0])

    def _check_trained(self, epoch: int, found: int | None, position: int) -> None:
        if self.orders.get(epoch, found) != found:
            raise DataError(
                f"epoch {epoch + 1} is partly trained, and {self._name} has not yielded the same {position} "
                "batches again, so samples would be trained twice or left out: seed its random numbers, by "
                "the epoch in `set_epoch`, and keep num_workers; or resume at the end of an epoch",
                epoch=epoch,
            )

    def _end(self, epoch: int, batches: int, *, is_empty: bool) -> None:
        if is_empty:
            less = " that is full, and drop_last=True leaves out any other" if self._loader.drop_last else ""
            raise DataError(
                f"epoch {epoch + 1} of {self._name} has no batch{less}: its iterator ended at once. "
                f"`__iter__` must return a new iterator each time",
                epoch=epoch,
            )
        with self._changed:
            self._lengths[epoch] = batches
            # They will not come, and for them the reader would go on however much lies here.
            for key in [key for key in self._waiting if key[0] == epoch]:
                del self._waiting[key]
        if self._on_end is not None:
            self._on_end(epoch, batches)


class Counted:
    """A collate function that also counts its samples.

    Attributes:
        collate: The function.
    """

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Batch]:
        """(samples, batch) of a list of samples."""
        return len(samples), self.collate(samples)


class Measured:
    """A collate function for items that are batches already; it also counts the samples in each.

    Args:
        convert: Makes a batch of an item.
    """

    def __init__(self, convert: Collate) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> tuple[int, Batch]:
        """(samples, batch) of a list of one item."""
        batch = self._convert(items[0])
        samples = batch_length(batch)
        if samples is None:
            raise TypeError(
                "with batch_size=None an item is a batch, and the length of its first tensor is the number "
                f"of its samples; there is no tensor with a dimension in this {type(batch).__name__}"
            )
        return samples, batch
