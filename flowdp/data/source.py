"""Access to the batches: the `Source` of all ranks, and the `Feed` of one.

A worker asks for a batch by number, and is woken once it is read. On the CPU it gets the source's batches as
they are (`Feed`). On CUDA they are copied ahead into a ring (`PrefetchFeed`), or the whole dataset lies on
the device and a batch is a gather (`ResidentFeed`). A worker treats all of them alike.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowdp.data.epoch_order import ALL, BatchOrder, Stride
from flowdp.data.identity import Identity
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

__all__ = ["Batch", "Feed", "Source"]

Batch = Any
"""A pytree of tensors, or whatever the collate function returns."""


class Source(ABC):
    """Deals the batches of a dataset, each by its (epoch, batch), to the rank it was planned for.

    Attributes:
        batch_size: Samples of every batch but, without drop_last, an epoch's last; None where they differ.
        batches: Batches of an epoch; None: each is as long as `on_end` says.
        samples: Samples dealt in an epoch, without a dropped tail; None where that is not known before.
        can_resume_inside: Whether a run can be resumed in the middle of an epoch.
        unseeded: The sampler that draws another order each time, so that it cannot; None otherwise.
        keeps: Taken batches are kept until `settle`, so that they can be taken again when their rank is lost.
        stride: Batches of an epoch that can be taken here; the numbers above count all of them.
        is_part: An IterableDataset yields these alone, and each machine's is another.
        checks_orders: The trained part of an epoch is compared with `orders` when it is read again.
        orders: Checksums of the trained parts of epochs.
    """

    can_resume_inside = True
    checks_orders = False
    orders: Mapping[int, int] = MappingProxyType({})
    keeps = False
    is_part = False
    _order: BatchOrder  # a source without one has its own `samples_in` and `indices`

    def __init__(self, order: BatchOrder | None, stride: Stride = ALL) -> None:
        self.stride = stride
        self.batch_size: int | None = None
        self.batches: int | None = None
        self.samples: int | None = None
        self.unseeded = None if order is None else order.unseeded
        self._on_end: Callable[[int, int], None] | None = None
        self._on_read: Callable[[int, int, int], None] | None = None
        if order is not None:
            self._order = order
            self.batch_size, self.batches, self.samples = order.batch_size, order.batches, order.samples

    def on_end(
        self, ended: Callable[[int, int], None], read: Callable[[int, int, int], None] | None = None
    ) -> None:
        """Set the callbacks of the reading, where `batches` is None. Call it before `start`.

        Args:
            ended: Called as `ended(epoch, batches)` by the reader thread, in the order of the epochs, before
                anything of the next one is there: no batch of this number or above can be taken. Must not
                block.
            read: Called as `read(epoch, batch, samples)` for each batch that was read, in their order.
        """
        self._on_end, self._on_read = ended, read

    def samples_in(self, epoch: int, batch: int) -> int:
        """Number of samples of a batch that was taken: of some it is known when they are read.

        Threads:
            Any.

        Raises:
            IndexError: An epoch has no such batch.
            ProtocolError: It lies in an epoch that cannot be drawn again; see `SamplerOrder`.
        """
        return self._order.samples_in(epoch, batch)

    def indices(self, epoch: int, batch: int) -> tuple[int, ...]:
        """The dataset indices of a batch, for errors that name them; none where samples have no number.

        Threads:
            Any.

        Raises:
            IndexError: An epoch has no such batch.
            ProtocolError: It lies in an epoch that cannot be drawn again; see `SamplerOrder`.
        """
        return tuple(self._order.indices(epoch, batch).tolist())

    def checksum(self, epoch: int, batches: int = 0) -> int | None:  # noqa: ARG002 - of a stream
        """Checksum of a sampler's draws for an epoch, or of so many batches that an IterableDataset yielded.

        None where the order is flowdp's own, and where it is not known; see `BatchOrder.checksum`.

        Threads:
            Any.
        """
        return None if self.batches is None else self._order.checksum(epoch)

    def identity(self) -> Identity:
        """Properties that must be the same on all machines of a run; see `check_identities`.

        Call it before `start`.

        Threads:
            The one that opened the dataset: a sampler may be iterated here.

        Raises:
            DataError: The sampler failed.
        """
        return Identity(self.samples, self.batches, self.batch_size, order=self._order.first_checksum())

    def threads(self) -> list[threading.Thread]:
        """The reading threads, for diagnostics.

        Threads:
            Any.
        """
        return []

    def waits_for(self) -> str:
        """The worker process for which the reading thread waits, in words; "" where it waits for none.

        Threads:
            Any.
        """
        return ""

    def start(  # noqa: B027 - here and below: where all batches are at hand there is nothing to do
        self, *, wake: Callable[[int, int, int], None], failed: Callable[[DataError], None]
    ) -> None:
        """Begin to read. Call it once, before any other thread of the run exists.

        Args:
            wake: Called as `wake(rank, epoch, batch)` once a batch is there that `take` did not have; that
                rank asks again. Must not block.
            failed: Called once, if reading fails.

        Threads:
            The calling thread starts the dataset's worker processes; the reader thread calls back.

        Raises:
            DataError: The worker processes could not be started.
        """

    def expect(  # noqa: B027
        self, rank: int, upcoming: Sequence[tuple[int, int, SampleRange | None]]
    ) -> None:
        """Announce the batches that a rank has not taken and will take if nothing changes.

        Level-triggered: the full list whenever it differs from the last one minus those taken. Where batches
        are given back, too, give them back first.

        Args:
            rank: Rank index.
            upcoming: (epoch, batch, part) of each, in the order of training.

        Threads:
            Any.
        """

    @abstractmethod
    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        """Hand a batch over, or None where it has not been read yet and `wake` will follow.

        Beyond the end of an epoch there is None, too, if it took the reading to find it.

        Args:
            rank: Rank index.
            epoch: The batch's epoch.
            batch: Its number in the epoch.
            part: The samples that are wanted, as a `Portion`; the batch stays until all its samples have been
                taken. None: all, as a batch.

        Threads:
            Any; one sample is taken by one rank.

        Raises:
            DataError: The dataset failed, or the batch cannot be cut.
            IndexError: There is no such batch.
            ProtocolError: The batch was taken before and not given back, or trained before a resume.
        """

    def give_back(  # noqa: B027
        self, epoch: int, batch: int, payload: Batch, part: SampleRange | None = None
    ) -> None:
        """Return batches that were taken and not trained, so that they can be taken again.

        Call it before the report that lets the batch be dealt anew.

        Threads:
            Any.
        """

    def settle(self, keys: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """These batches are averaged in and will not be requested again.

        Args:
            keys: (epoch, batch) of each, taken and trained whole.

        Threads:
            Any.
        """

    def reclaim(self, rank: int) -> None:  # noqa: B027
        """Reclaim the batches of a lost rank, but for those given back or settled.

        Call it before the report that lets those batches be dealt anew, when that rank takes nothing more.

        Threads:
            Any.
        """

    def close(self) -> bool:
        """Stop reading, end threads and processes; takes 2 s at most, and may be called twice.

        Returns:
            False where a thread is still inside the dataset's own code; it ends with that call.

        Threads:
            Any but the reader's own, so not from `wake` or `failed`.
        """
        return True


class Feed:
    """The batches of one rank, as the source has them: those of a CPU device lie in its memory already.

    In a round the worker calls `take`, once or more, enqueues the work on the batches, and calls `release`,
    again and again; `follow` whenever the list of its batches has changed.

    Args:
        source: Source of all ranks' batches.
        rank: Rank index.

    Threads:
        The worker of the rank, unless a method says otherwise.
    """

    def __init__(self, source: Source, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._notify: Callable[[int, int], None]

    def start(self, notify: Callable[[int, int], None]) -> None:
        """Start fetching. Call it once, after the source was started.

        Args:
            notify: Called as `notify(epoch, batch)` once a batch is there that `take` did not have, or
                `take` would raise. Must not block.

        Threads:
            The one that starts the run.
        """
        self._notify = notify

    def follow(self, upcoming: Sequence[tuple[int, int, SampleRange | None]]) -> None:
        """Announce the batches that this rank will train if nothing changes.

        Level-triggered: pass the full list whenever it differs from the last one minus the steps already
        taken. A batch that was fetched and is not in it is back at the source when this returns.

        Args:
            upcoming: (epoch, batch, part) of each, in order.
        """
        self._source.expect(self._rank, upcoming)

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        """Hand a batch over, on the device; None where it is not there yet, and `notify` follows.

        With a `part` it is a `Portion` of these samples, else the whole batch.

        Streams:
            `compute` waits for the batch's copy.

        Raises:
            DataError: The dataset failed, or its batches cannot be cut.
            IndexError: There is no such batch.
            ProtocolError: The batch was taken before, or too many before it were not released.
            RuntimeError: The device failed.
        """
        return self._source.take(self._rank, epoch, batch, part)

    def release(self) -> None:
        """All that uses the batches taken so far is enqueued; their memory may be written again.

        Streams:
            A mark is recorded on `compute`.
        """

    def wake(self, epoch: int, batch: int) -> None:
        """Note that the source has read a batch that it did not have before.

        Threads:
            The source's own. Does not block.
        """
        self._notify(epoch, batch)

    def fit(self) -> None:
        """Note that a whole step has been taken, so that the memory left may be measured, and used.

        Call it whenever a mean is in.
        """

    def shrink(self) -> bool:
        """Give all memory of batches ahead back: a step has run out of memory.

        Returns:
            False where there was none.
        """
        return False

    def close(self) -> bool:
        """End its threads and free its memory; takes 1 s at most, and may be called twice.

        No batch is taken afterwards.

        Returns:
            False where a thread still waits for the device; it ends with that wait.

        Threads:
            Any but the feed's own.
        """
        return True
