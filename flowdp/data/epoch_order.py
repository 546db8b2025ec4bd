"""The order of an epoch: which samples make up batch b of epoch e.

An epoch has exactly ceil(samples / batch_size) batches on any number of devices (floor with drop_last), and
every sample lies in one of them; a batch sampler makes batches of its own. Batches are numbered within their
epoch: (epoch, batch) names one for good.
"""

from __future__ import annotations

import itertools
import operator
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flowdp.data.limit import Limit
from flowdp.errors import CheckpointError, DataError, OptionError, ProtocolError
from flowdp.policy.formats import format_error
from flowdp.protocol.position import Position

__all__ = [
    "ALL",
    "NOTHING_TRAINED",
    "AllEpochs",
    "BatchOrder",
    "EpochOrder",
    "SamplerOrder",
    "Stride",
    "batches_per_epoch",
    "epoch_order",
]

NOTHING_TRAINED = Position(world_size=1)
"""Data position of a run that has just begun."""

# Ranks stand in at most two epochs at once, and an error may still name a batch of the one before. More
# epochs are alive only where they are short, and a short one is quickly drawn again.
KEPT_EPOCHS = 3

# A sampler's draws cannot be repeated, so of short epochs enough are kept for all batches in flight.
KEPT_BATCHES = 4096

_DRAWING = threading.RLock()
"""Held while a sampler is iterated, which two runs may share."""


class Stride(NamedTuple):
    """The batches of an evaluation that one of several machines reads: `first`, first + `step`, ...

    They keep their numbers in the whole.
    """

    first: int = 0
    step: int = 1

    def of(self, batches: int) -> int:
        """Number of these among the first `batches` batches."""
        return len(range(self.first, batches, self.step))

    def has(self, batch: int) -> bool:
        """Whether a batch is one of them."""
        return batch % self.step == self.first


ALL = Stride()
"""All batches: there is one machine, or the dataset is trained."""


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """The shuffled indices of an epoch, a function of (seed, epoch) alone.

    The pair is hashed, not added: with seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1.

    Returns:
        A permutation of 0..samples - 1, int64. Shape [samples].
    """
    state = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    return torch.randperm(samples, generator=generator, device="cpu")


def batches_per_epoch(samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches of an epoch: floor(samples / batch_size) with `drop_last`, else the ceiling."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


class BatchOrder(ABC):
    """Indices of each batch of each epoch.

    Threads:
        Any, at once: ranks may stand in different epochs.

    Attributes:
        batch_size: Samples of every batch but, without drop_last, an epoch's last; None where they differ.
        batches: Batches of an epoch.
        samples: Samples dealt in an epoch, without a dropped tail; None where epochs differ.
    """

    _kept = KEPT_EPOCHS

    def __init__(self, drawn: int, batch_size: int | None, drop_last: bool) -> None:
        self._size = batch_size or 1
        self.batch_size = batch_size
        batches = batches_per_epoch(drawn, self._size, drop_last)
        self._end_at(batches, min(drawn, batches * self._size))
        self._first = 0  # epoch
        self._epochs: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # serialises drawing, so that no epoch is drawn twice

    def limit(self, limit: Limit) -> None:
        """Leave the end of every epoch out. Call it before anything is asked for."""
        batches = limit.of(self.batches)
        stop = min(self._stop, batches * self._size)
        if limit.samples is not None:
            stop = min(stop, limit.samples)
        self._end_at(-(-stop // self._size), stop)

    def _end_at(self, batches: int, stop: int) -> None:
        self.batches, self._stop = batches, stop
        self._full = 0 if self.batch_size is None else stop // self._size  # full batches
        self.samples = None if self.batch_size is None else stop

    def indices(self, epoch: int, batch: int) -> Tensor:
        """The dataset indices of a batch, int64. Shape [samples_in(epoch, batch)].

        Raises:
            IndexError: An epoch has no such batch.
        """
        self._check(batch)
        # On the path of every step: no lock, because reading a dict is atomic and a kept order never changes.
        order = self._epochs.get(epoch)
        if order is None:
            order = self._find(epoch)
        start, stop = self._span(epoch, batch)
        return order[start:stop]

    def begin_at(self, epoch: int) -> None:
        """Earlier epochs than this one will not be asked for. Call it before anything is."""
        self._first = epoch

    def first_checksum(self) -> int:
        """Checksum of the order of the first epoch that is read, which is drawn for it."""
        return zlib.crc32(self._find(self._first)[: self._stop].numpy().tobytes())

    @property
    def unseeded(self) -> str | None:
        """The sampler that draws another order each time, so that no epoch can be entered; None: all can."""
        return None

    def checksum(self, _epoch: int) -> int | None:  # an order that can be repeated needs none
        """Checksum of a sampler's draws for an epoch, while any of its batches can be in work.

        None where it has not drawn them yet, and where the order is flowdp's own.
        """
        return None

    def samples_in(self, epoch: int, batch: int) -> int:
        """Number of samples of a batch.

        Raises:
            IndexError: An epoch has no such batch.
        """
        if 0 <= batch < self._full:  # on the path of every step
            return self._size
        self._check(batch)
        start, stop = self._span(epoch, batch)
        return stop - start

    def _check(self, batch: int) -> None:
        if not 0 <= batch < self.batches:
            raise IndexError(f"batch {batch} of an epoch of {self.batches} batches")

    def _span(self, _epoch: int, batch: int) -> tuple[int, int]:  # those of a batch sampler differ
        start = batch * self._size
        return start, min(start + self._size, self._stop)

    def _find(self, epoch: int) -> Tensor:
        with self._lock:
            order = self._epochs.get(epoch)
            return self._draw(epoch) if order is None else order

    def _keep(self, epoch: int, order: Tensor) -> Tensor:
        self._epochs[epoch] = order
        if len(self._epochs) > self._kept:
            del self._epochs[next(iter(self._epochs))]
        return order

    @abstractmethod
    def _draw(self, epoch: int) -> Tensor:
        """Draw the indices of an epoch and keep them; called under the lock."""


class EpochOrder(BatchOrder):
    """flowdp's own order: shuffled from (seed, epoch), or 0, 1, 2, ... in every epoch."""

    def __init__(self, samples: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool) -> None:
        super().__init__(samples, batch_size, drop_last)
        self._seed = seed
        self._drawn = samples
        self._straight = None if shuffle else torch.arange(samples, device="cpu")

    def _draw(self, epoch: int) -> Tensor:
        if self._straight is not None:
            return self._keep(epoch, self._straight)
        return self._keep(epoch, epoch_order(self._drawn, self._seed, epoch))


class SizedIterable(Protocol):
    """Interface of a sampler: its length is known, and it can be iterated again and again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class SamplerOrder(BatchOrder):
    """The order of a torch sampler or batch sampler, iterated once per epoch, in the order of the epochs.

    It is iterated when an epoch is first asked for; epochs that were skipped are drawn on the way, so that
    epoch e is always the sampler's e-th. Where the sampler has `set_epoch`, that is called first and decides
    alone, so a resumed run draws no earlier epoch. Any other sampler must then repeat its draws of the first
    process, so it needs a generator of its own with a fixed seed; checksums tell whether it did.

    Args:
        sampler: Anything with a length that yields dataset indices.
        batch_size: Samples of a batch; None: it yields lists of indices, the batches, of any sizes but 0.
        drop_last: See `batches_per_epoch`.
    """

    def __init__(
        self, sampler: SizedIterable, batch_size: int | None = None, drop_last: bool = False
    ) -> None:
        self._sampler = sampler
        self._length = len(sampler)
        super().__init__(self._length, batch_size, drop_last)
        self._checksums: dict[int, int] = {}
        self._stops: dict[int, list[int]] = {}  # of a batch sampler's epochs: where each batch ends
        self._next = 0

    @property
    def _kept(self) -> int:  # type: ignore[override]
        return KEPT_EPOCHS + KEPT_BATCHES // max(self.batches, 1)

    def begin_at(self, epoch: int) -> None:
        """See `BatchOrder.begin_at`."""
        super().begin_at(epoch)
        if self._set_epoch() is not None:
            self._next = epoch

    def checksum(self, epoch: int) -> int | None:
        """See `BatchOrder.checksum`."""
        return self._checksums.get(epoch)

    def first_checksum(self) -> int:
        """See `BatchOrder.first_checksum`; of a batch sampler with the sizes of its batches."""
        self._find(self._first)
        return self._checksums[self._first]

    @property
    def unseeded(self) -> str | None:
        """See `BatchOrder.unseeded`; of samplers that have a `generator`, as torch's, and no `set_epoch`."""
        sampler = getattr(self._sampler, "sampler", self._sampler)
        is_unseeded = self._set_epoch() is None and getattr(sampler, "generator", self) is None
        return type(sampler).__name__ if is_unseeded else None

    def check_repeats(self) -> None:
        """Check that the sampler may draw an epoch again that it drew before, in another process.

        Raises:
            CheckpointError: It draws by a generator without a seed.
        """
        if self.unseeded is not None:
            raise CheckpointError(
                f"a part is trained of an epoch of the sampler {self.unseeded}, which draws "
                "another order each time: give it a generator with a seed, or `set_epoch`, or go on from a "
                "checkpoint at an epoch's end"
            )

    def check_alike(self, epochs: int | None) -> None:
        """Check that the sampler can draw the same orders on several machines, where flowdp deals them out.

        Without a generator or `set_epoch` nothing tells what it draws from: then two epochs must be equal.

        Args:
            epochs: Epochs of the run; None: without end.

        Raises:
            DataError: The sampler failed.
            OptionError: Nothing makes its draws the same.
        """
        inner = getattr(self._sampler, "sampler", self._sampler)
        has_seed = self._set_epoch() is not None or getattr(inner, "generator", None) is not None
        if has_seed or (epochs is not None and epochs <= self._first + 1):
            return
        self._find(self._first + 1)
        if self._checksums[self._first] != self._checksums[self._first + 1]:
            raise OptionError(
                f"the sampler {type(inner).__name__} draws another order each time, so another one on each "
                "machine of this run, and samples would be trained twice or not at all: give it a generator "
                "with a seed, or `set_epoch`, so that all machines draw the same"
            )

    def _draw(self, epoch: int) -> Tensor:
        if epoch < self._next:
            raise ProtocolError(
                f"epoch {epoch} of the sampler was asked for again after epoch {self._next - 1}; "
                f"the last {self._kept} are kept"
            )
        while self._next <= epoch:
            order = self._keep(self._next, self._iterate(self._next))
            self._next += 1
        return order

    def _iterate(self, epoch: int) -> Tensor:
        name = type(self._sampler).__name__
        what = "batches" if self.batch_size is None else "indices"
        try:
            with _DRAWING:
                set_epoch = self._set_epoch()
                if set_epoch is not None:
                    set_epoch(epoch)
                # One item at a time: a sampler may fill the list that it yields anew for each batch.
                drawn = [self._indices_of(item) for item in self._sampler]
        except Exception as error:
            raise DataError(
                f"the sampler {name} failed in epoch {epoch}: {format_error(error)}", epoch=epoch
            ) from error
        if len(drawn) != self._length:
            raise DataError(
                f"the sampler {name} yielded {len(drawn)} {what} in epoch {epoch}, but its length is "
                f"{self._length}; make `__len__` and `__iter__` agree",
                epoch=epoch,
            )
        order = torch.tensor(list(itertools.chain(*drawn)), dtype=torch.int64, device="cpu")
        checksum = zlib.crc32(order[: None if self.batch_size is None else self._stop].numpy().tobytes())
        if self.batch_size is None:
            stops = list(itertools.accumulate(map(len, drawn)))
            self._stops = {kept: self._stops[kept] for kept in self._epochs} | {epoch: stops}
            checksum = zlib.crc32(np.array(stops, np.int64).tobytes(), checksum)
        self._checksums[epoch] = checksum  # before any rank can train of it
        if len(self._checksums) > KEPT_BATCHES:
            del self._checksums[next(iter(self._checksums))]
        return order

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        if self.batch_size is not None:
            return super()._span(epoch, batch)
        self._find(epoch)
        stops = self._stops[epoch]
        return stops[batch - 1] if batch else 0, stops[batch]

    def _indices_of(self, item: Any) -> list[int]:
        """A copy of one item of the sampler, as plain integers."""
        if self.batch_size is not None:
            return [operator.index(item)]
        indices = [operator.index(index) for index in item]
        if not indices:
            raise ValueError("a batch has no samples")
        return indices

    def _set_epoch(self) -> Callable[[int], object] | None:
        """`set_epoch` of the sampler, or of the one that it draws from; None without one."""
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            set_epoch: Callable[[int], object] | None = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                return set_epoch
        return None


class AllEpochs:
    """The batches of all epochs one after another, as torch's DataLoader asks for them: a batch sampler.

    A resumed run has those that are not trained yet, the open epochs' in ascending order. With `epochs` None
    there is no end.

    torch asks for indices long before it hands their batch over, and for the first ones from the thread that
    starts it. So a sampler that fails ends the iteration, and its error waits in `error` until the batches
    before it have come.
    """

    def __init__(
        self,
        order: BatchOrder,
        epochs: int | None,
        start: Position = NOTHING_TRAINED,
        stride: Stride = ALL,
    ) -> None:
        self.error: DataError | None = None
        self._order = order
        self._epochs = epochs
        self._start = start
        self._stride = stride

    def walk(self) -> Iterator[tuple[int, int]]:
        """Every (epoch, batch) in the order of reading."""
        if not self._stride.of(self._order.batches):
            return  # not one in any epoch, and there may be no last one
        first = self._start.done
        for epoch in itertools.count(first) if self._epochs is None else range(first, self._epochs):
            position, missing = self._start.remaining(epoch) or (0, ())
            for batch in itertools.chain(missing, range(position, self._order.batches)):
                if self._stride.has(batch):
                    yield (epoch, batch)

    def __iter__(self) -> Iterator[list[int]]:
        for epoch, batch in self.walk():
            try:
                indices = self._order.indices(epoch, batch)
            except DataError as error:
                self.error = error
                return
            yield indices.tolist()
