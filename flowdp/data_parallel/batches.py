"""Batches of the user's loader: read by it, or gathered on the devices where its dataset's tensors lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from flowdp.data.batches import Portion
from flowdp.data.memory import OwnMemory
from flowdp.data.processes import starting
from flowdp.data.resident import ResidentTensors
from flowdp.data.slots import keep_for
from flowdp.data.staging import Staging
from flowdp.data.trees import batch_length, flatten, unflatten
from flowdp.device.accelerator import is_accelerator
from flowdp.device.memory import empty_cache, read_memory
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import DataError
from flowdp.policy.budget import fits

__all__ = [
    "END",
    "Copied",
    "LoaderBatches",
    "ResidentBatches",
    "may_read_ahead",
    "open_batches",
    "samples_of",
]

Copied = dict[torch.device, int]
"""Bytes of the largest copies of datasets for an epoch so far, by device."""

END = object()
"""Behind the last batch of a loader."""


def may_read_ahead(loader: object) -> bool:
    """Whether a thread may ask for batches while the user's thread does anything else.

    Two threads that read one file through a dataset get wrong samples without an error, and the loop around
    an epoch may read the same files, to evaluate, say. So a dataset's own code runs in the user's thread, as
    it does without flowdp, or in worker processes.
    """
    if not isinstance(loader, DataLoader):
        return isinstance(loader, (list, tuple))
    return loader.num_workers > 0 or _is_of_tensors(loader)


def samples_of(batch: Any) -> int:
    """Samples of a batch.

    Raises:
        DataError: It has none.
    """
    samples = batch_length(batch)
    if not samples:
        raise DataError(f"the loader gave a batch without samples: {batch!r:.100}")
    return samples


class LoaderBatches:
    """Batches of a loader, in its order, and their way to the devices.

    A batch is what `next` returns; only the other methods look into it.

    Args:
        loader: Any iterable of batches. Its iterator is made here, by the calling thread, as worker processes
            want it.
        lanes: One per rank.

    Threads:
        One at a time.
    """

    def __init__(self, loader: Iterable[Any], lanes: Sequence[Lane]) -> None:
        has_processes = isinstance(loader, DataLoader) and loader.num_workers > 0
        with starting() if has_processes else nullcontext():
            self._batches: Iterator[Any] = iter(loader)
        self._memory = None if may_read_ahead(loader) else OwnMemory()
        self._lanes = lanes
        self._staging = {rank: Staging(lane) for rank, lane in enumerate(lanes) if lane.is_async}
        if isinstance(loader, (list, tuple)):  # the caller may have made its batches on a device
            for lane in lanes:
                lane.await_caller(lane.copy)

    def next(self) -> Any:
        """The next batch; `END` behind the last.

        Raises:
            BaseException: Raised by the loader.
        """
        return next(self._batches, END)

    def own(self, batch: Any) -> Any:
        """The batch in memory of its own, where further ones are read before it is used.

        Raises:
            DataError: The loader has written to one that it gave before.
        """
        return batch if self._memory is None else self._memory.own(batch, "a batch of the loader")

    def parts(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """A batch cut into consecutive parts of so many samples, themselves batches."""
        portion = Portion.of(batch, sum(sizes))
        return [portion.rows(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]

    def bring(self, batch: Any, rank: int) -> Any:
        """The batch as the user's code gets it, on a rank's device, through pinned memory.

        Streams:
            The rank's `copy` is current.
        """
        if rank not in self._staging:
            return batch
        leaves, form = flatten(batch)
        return unflatten(self._staging[rank].bring(leaves), form)

    def whole(self, batch: Any) -> Any:
        """The batch as the loader gives it."""
        return batch


class ResidentBatches(LoaderBatches):
    """Batches of a DataLoader over tensors, of which each device has a copy for one epoch.

    The loader's sampler draws the samples, and nothing else of it runs: a batch is their rows, until it is
    gathered. An epoch trains the tensors as they are when it begins. When torch counts a write to one, later
    batches are gathered from where they lie.

    Args:
        loader: See `fits_on`.
        lanes: One per rank, all of them with streams.

    Attributes:
        there: The copies, by device.

    Raises:
        torch.OutOfMemoryError: A device has no room for the tensors.

    Threads:
        Made by the user's.
    """

    def __init__(self, loader: DataLoader[Any], lanes: Sequence[Lane]) -> None:
        self._tensors: tuple[Tensor, ...] = loader.dataset.tensors  # type: ignore[attr-defined]
        for lane in lanes:
            lane.await_caller(lane.copy)  # which may have made them, on any stream
        self._versions = self._count_writes()
        self._is_written = False
        places = {lane.device: lane for lane in reversed(lanes)}  # the first rank of each
        self.there = {device: ResidentTensors(self._tensors, lane) for device, lane in places.items()}
        super().__init__(loader, lanes)
        # With its iterator the loader draws what it always draws from torch's generator.
        self._batches = self._batches._sampler_iter  # type: ignore[attr-defined]

    @staticmethod
    def fits_on(loader: object, lanes: Sequence[Lane], usage: float, copied: Copied) -> bool:
        """Whether a loader's batches can be gathered on these devices, and the tensors fit there.

        Args:
            loader: Any iterable of batches.
            lanes: One per rank.
            usage: Part of a device that may be in use.
            copied: Copies of earlier epochs, which are gone.
        """
        # One of another class may do more to its batches.
        if type(loader) is not DataLoader or loader.num_workers or not _is_of_tensors(loader):
            return False
        tensors: Sequence[Tensor] = loader.dataset.tensors  # type: ignore[attr-defined]
        return (
            loader.batch_sampler is not None
            and all(type(one) is Tensor and one.layout is torch.strided for one in tensors)
            and not any(one.requires_grad or one.is_inference() for one in tensors)
            and all(_has_room(tensors, lane, usage, copied.get(lane.device, 0)) for lane in lanes)
        )

    def next(self) -> Any:
        """Rows of the next batch. Shape [samples]."""
        drawn = super().next()
        if drawn is END:
            return END
        self._is_written = self._is_written or self._count_writes() != self._versions
        index, length = torch.as_tensor(drawn, dtype=torch.int64, device="cpu"), len(self._tensors[0])
        # On the device a wrong one would end the process's use of CUDA.
        for wrong in index[(index < -length) | (index >= length)].tolist():
            raise IndexError(f"index {wrong} is out of range: the dataset has {length} samples")
        return index.remainder(length)

    def bring(self, batch: Tensor, rank: int) -> Any:
        """Gather it; see `LoaderBatches.bring`."""
        lane = self._lanes[rank]
        if self._is_written:
            lane.await_default(lane.copy, lane.device)
            with QUIET if any(is_accelerator(one.device) for one in self._tensors) else nullcontext():
                written = self.whole(batch)
            return super().bring(written, rank)
        data = self.there[lane.device]
        rows = super().bring(batch, rank)
        lane.copy.wait_event(data.copied)
        with QUIET:
            made = [
                torch.empty((len(batch), *one.shape[1:]), dtype=one.dtype, device=lane.device)
                for one in data.tensors
            ]
            for one, out in zip(data.tensors, made, strict=True):
                torch.index_select(one, 0, rows, out=out)  # the first one loads its kernel
        # The copies may be another rank's, and the tensors the user's, who may let go of them.
        keep_for(lane.copy, data.tensors)
        return made

    def whole(self, batch: Tensor) -> list[Tensor]:
        """The batch as the loader would have made it."""
        return [tensor.index_select(0, batch.to(tensor.device)) for tensor in self._tensors]

    def _count_writes(self) -> list[int]:
        """Writes to the tensors that torch has counted."""
        return [tensor._version for tensor in self._tensors]


def open_batches(loader: Iterable[Any], lanes: Sequence[Lane], usage: float, copied: Copied) -> LoaderBatches:
    """The batches of a loader: gathered on the devices where that is possible, else as the loader makes them.

    Args:
        loader: Any iterable of batches.
        lanes: One per rank.
        usage: Part of a device that may be in use.
        copied: Copies of earlier epochs, which are gone; those of this one are added.

    Threads:
        The user's.
    """
    if ResidentBatches.fits_on(loader, lanes, usage, copied):
        assert isinstance(loader, DataLoader)
        try:
            batches = ResidentBatches(loader, lanes)
        except torch.OutOfMemoryError:
            pass
        else:
            for device, data in batches.there.items():
                copied[device] = max(copied.get(device, 0), data.nbytes)
            return batches
        # Here, where no traceback keeps the copies so far.
        with QUIET:
            empty_cache(lanes[0])
    return LoaderBatches(loader, lanes)


def _is_of_tensors(loader: DataLoader[Any]) -> bool:
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _has_room(tensors: Sequence[Tensor], lane: Lane, usage: float, copied: int) -> bool:
    memory = read_memory(lane)
    if memory is None:
        return False
    needed = sum(tensor.nbytes for tensor in tensors if tensor.device != lane.device)
    # The copies of earlier epochs were a part of the peak, which is the user's to reset.
    return fits(replace(memory, peak=memory.peak - copied), needed, usage=usage)
