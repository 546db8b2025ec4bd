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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flowdp.data.limit import UNLIMITED, Limit
from flowdp.errors import DataError, OptionError, ProtocolError
from flowdp.policy.formats import format_error
from flowdp.protocol.position import Position

__all__ = [
    "ALL",
    "NOTHING_TRAINED",
    "BatchOrder",
    "EpochOrder",
    "SamplerOrder",
    "Stride",
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


class Drawn(NamedTuple):
    """The order of one epoch.

    Attributes:
        indices: Dataset indices, int64. Shape [samples].
        stops: Where each batch of a batch sampler ends; None: batches are equal.
        checksum: Checksum of a sampler's draws; None of an order that can be repeated.
    """

    indices: Tensor
    stops: Sequence[int] | None = None
    checksum: int | None = None


class BatchOrder(ABC):
    """Indices of each batch of each epoch.

    Args:
        drawn: Samples that are drawn for an epoch, or batches of a batch sampler.
        batch_size: Samples of a batch; None: a batch sampler makes them.
        drop_last: Leave out a last batch that is not full.
        limit: Part of each epoch that is dealt.
        first: Earlier epochs than this one will not be asked for.

    Threads:
        Any, at once: ranks may stand in different epochs.

    Attributes:
        batch_size: Samples of every batch but, without drop_last, an epoch's last; None where they differ.
        batches: Batches of an epoch.
        samples: Samples dealt in an epoch, without a dropped tail; None where epochs differ.
        unseeded: The sampler that draws another order each time, so that no epoch can be entered; None: all
            can.
    """

    unseeded: str | None = None

    def __init__(self, drawn: int, batch_size: int | None, drop_last: bool, limit: Limit, first: int) -> None:
        size = batch_size or 1
        batches = drawn // size if drop_last else -(-drawn // size)
        ends = [drawn, limit.of(batches) * size, *([] if limit.samples is None else [limit.samples])]
        self._size, self._stop = size, min(ends)
        self.batch_size = batch_size
        self.batches = -(-self._stop // size)
        self.samples = None if batch_size is None else self._stop
        self._first = first
        self._kept = KEPT_EPOCHS
        self._epochs: dict[int, Drawn] = {}
        self._lock = threading.Lock()  # serialises drawing, so that no epoch is drawn twice

    def indices(self, epoch: int, batch: int) -> Tensor:
        """The dataset indices of a batch, int64. Shape [samples_in(epoch, batch)].

        Raises:
            IndexError: An epoch has no such batch.
        """
        start, stop = self._span(epoch, batch)
        return self._find(epoch).indices[start:stop]

    def samples_in(self, epoch: int, batch: int) -> int:
        """Number of samples of a batch.

        Raises:
            IndexError: An epoch has no such batch.
        """
        start, stop = self._span(epoch, batch)
        return stop - start

    def checksum(self, epoch: int) -> int | None:
        """Checksum of a sampler's draws for an epoch, while any of its batches can be in work.

        None where it has not drawn them yet, and where the order is flowdp's own.
        """
        drawn = self._epochs.get(epoch)
        return None if drawn is None else drawn.checksum

    def first_checksum(self) -> int:
        """Checksum of the order of the first epoch that is read, which is drawn for it."""
        drawn = self._find(self._first)
        return _checksum(drawn.indices[: self._stop]) if drawn.checksum is None else drawn.checksum

    def _span(self, epoch: int, batch: int) -> tuple[int, int]:
        """Places in the epoch's order where a batch begins and ends."""
        if not 0 <= batch < self.batches:
            raise IndexError(f"batch {batch} of an epoch of {self.batches} batches")
        if self.batch_size is None:
            stops = self._find(epoch).stops or ()
            return stops[batch - 1] if batch else 0, stops[batch]
        start = batch * self._size
        return start, min(start + self._size, self._stop)

    def _find(self, epoch: int) -> Drawn:
        # On the path of every step: no lock, because reading a dict is atomic and a kept order never changes.
        if (drawn := self._epochs.get(epoch)) is not None:
            return drawn
        with self._lock:
            return self._epochs.get(epoch) or self._draw(epoch)

    def _keep(self, epoch: int, drawn: Drawn) -> Drawn:
        self._epochs[epoch] = drawn
        if len(self._epochs) > self._kept:
            del self._epochs[next(iter(self._epochs))]
        return drawn

    @abstractmethod
    def _draw(self, epoch: int) -> Drawn:
        """Draw an epoch and keep it; called under the lock."""


class EpochOrder(BatchOrder):
    """flowdp's own order: shuffled from (seed, epoch), or 0, 1, 2, ... in every epoch."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        limit: Limit = UNLIMITED,
        first: int = 0,
    ) -> None:
        super().__init__(samples, batch_size, drop_last, limit, first)
        self._seed = seed
        self._drawn = samples
        self._straight = None if shuffle else Drawn(torch.arange(samples, device="cpu"))

    def _draw(self, epoch: int) -> Drawn:
        return self._keep(epoch, self._straight or Drawn(epoch_order(self._drawn, self._seed, epoch)))


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
        drop_last: Leave out a last batch that is not full.
        limit: See `BatchOrder`.
        first: See `BatchOrder`.
    """

    def __init__(
        self,
        sampler: SizedIterable,
        batch_size: int | None = None,
        drop_last: bool = False,
        limit: Limit = UNLIMITED,
        first: int = 0,
    ) -> None:
        self._sampler = sampler
        self._length = len(sampler)
        super().__init__(self._length, batch_size, drop_last, limit, first)
        self._kept += KEPT_BATCHES // max(self.batches, 1)
        inner = getattr(sampler, "sampler", sampler)  # from which a batch sampler draws
        self._set_epoch: Callable[[int], object] | None = getattr(
            sampler, "set_epoch", getattr(inner, "set_epoch", None)
        )
        self._inner = type(inner).__name__
        self._has_seed = self._set_epoch is not None or getattr(inner, "generator", None) is not None
        # Torch's samplers have a `generator`; of others nothing tells what they draw from.
        self.unseeded = self._inner if hasattr(inner, "generator") and not self._has_seed else None
        self._next = 0 if self._set_epoch is None else first

    def check_alike(self, epochs: int | None) -> None:
        """Check that the sampler can draw the same orders on several machines, where flowdp deals them out.

        Without a generator or `set_epoch` nothing tells what it draws from: then two epochs must be equal.

        Args:
            epochs: Epochs of the run; None: without end.

        Raises:
            DataError: The sampler failed.
            OptionError: Nothing makes its draws the same.
        """
        if self._has_seed or (epochs is not None and epochs <= self._first + 1):
            return
        self._find(self._first + 1)
        if self.checksum(self._first) != self.checksum(self._first + 1):
            raise OptionError(
                f"the sampler {self._inner} draws another order each time, so another one on each "
                "machine of this run, and samples would be trained twice or not at all: give it a generator "
                "with a seed, or `set_epoch`, so that all machines draw the same"
            )

    def _draw(self, epoch: int) -> Drawn:
        if epoch < self._next:
            raise ProtocolError(
                f"epoch {epoch + 1} of the sampler was asked for again after epoch {self._next}; "
                f"the last {self._kept} are kept"
            )
        while self._next <= epoch:
            drawn = self._keep(self._next, self._iterate(self._next))
            self._next += 1
        return drawn

    def _iterate(self, epoch: int) -> Drawn:
        name = type(self._sampler).__name__
        what = "batches" if self.batch_size is None else "indices"
        try:
            with _DRAWING:
                if self._set_epoch is not None:
                    self._set_epoch(epoch)
                # One item at a time: a sampler may fill the list that it yields anew for each batch.
                items = [self._indices_of(item) for item in self._sampler]
        except Exception as error:
            raise DataError(
                f"the sampler {name} failed in epoch {epoch + 1}: {format_error(error)}", epoch=epoch
            ) from error
        if len(items) != self._length:
            raise DataError(
                f"the sampler {name} yielded {len(items)} {what} in epoch {epoch + 1}, but its length is "
                f"{self._length}; make `__len__` and `__iter__` agree",
                epoch=epoch,
            )
        indices = torch.tensor(list(itertools.chain(*items)), dtype=torch.int64, device="cpu")
        if self.batch_size is not None:
            return Drawn(indices, checksum=_checksum(indices[: self._stop]))
        stops = list(itertools.accumulate(map(len, items)))
        return Drawn(indices, stops, _checksum(indices, torch.tensor(stops, device="cpu")))

    def _indices_of(self, item: Any) -> list[int]:
        """A copy of one item of the sampler, as plain integers."""
        if self.batch_size is not None:
            return [operator.index(item)]
        indices = [operator.index(index) for index in item]
        if not indices:
            raise ValueError("a batch has no samples")
        return indices


def _checksum(*parts: Tensor) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.numpy().tobytes(), checksum)
    return checksum
