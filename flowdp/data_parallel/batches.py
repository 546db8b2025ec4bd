"""Batches of the user's loader: read by it, or gathered on the devices where its dataset's tensors lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from flowdp.data.processes import starting
from flowdp.data.resident import ResidentTensors
from flowdp.data.slots import keep_for
from flowdp.data.staging import Staging
from flowdp.data.trees import batch_length, flatten, tensors_of, unflatten
from flowdp.data_parallel.windows import Piece
from flowdp.device.memory import read_memory
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import DataError
from flowdp.policy.budget import fits

__all__ = ["LoaderBatches", "ResidentBatches", "can_gather", "may_read_ahead", "samples_of"]


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

    A batch is what it yields; only the other methods look into it.

    Args:
        loader: Any iterable of batches. Its iterator is made here, by the calling thread, as worker processes
            want it. The caller may have made its batches on a device, on any stream.
        lanes: One per rank.

    Threads:
        One at a time.
    """

    def __init__(self, loader: Iterable[Any], lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.await_caller(lane.copy)
        with starting():
            self._batches: Iterator[Any] = iter(loader)
        self._lanes = lanes
        self._staging = [Staging(lane) for lane in lanes]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def piece(self, rank: int, batch: Any, samples: int) -> Piece:
        """A batch, or a part of one, on its way to a rank's device."""
        lane = self._lanes[rank]
        if not lane.is_async:
            return Piece(rank, batch, samples)
        copied = lane.event()
        if any(tensor.device == lane.device for tensor in tensors_of(batch)):
            lane.await_caller(lane.copy)  # the loader has made them, in this thread
        with lane.on(lane.copy):
            there = self.bring(batch, rank)
            copied.record(lane.copy)

        def arrive() -> None:
            stream = lane.current()
            stream.wait_event(copied)
            keep_for(stream, tensors_of(there))

        return Piece(rank, there, samples, arrive)

    def bring(self, batch: Any, rank: int) -> Any:
        """The batch as the user's code gets it, on a rank's accelerator, through pinned memory.

        Streams:
            The rank's `copy` is current.
        """
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
        loader: A loader that can be gathered; see `can_gather`.
        lanes: One per rank, all of them with streams.

    Threads:
        Made by the user's.
    """

    def __init__(self, loader: DataLoader[Any], lanes: Sequence[Lane]) -> None:
        assert loader.batch_sampler is not None
        super().__init__(loader.batch_sampler, lanes)
        # The loader's iterator draws a seed for its workers here: later draws are as behind a plain epoch.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._tensors = _tensors_of(loader)
        self._versions = self._count_writes()
        places = {lane.device: lane for lane in reversed(lanes)}  # the first rank of each
        self._there = {device: ResidentTensors(self._tensors, lane) for device, lane in places.items()}

    def __next__(self) -> Tensor:
        """Rows of the next batch. Shape [samples]."""
        index = torch.as_tensor(super().__next__(), dtype=torch.int64, device="cpu")
        length = len(self._tensors[0])
        # On the device a wrong one would end the process's use of CUDA.
        for wrong in index[(index < -length) | (index >= length)].tolist():
            raise IndexError(f"index {wrong} is out of range: the dataset has {length} samples")
        return index.remainder(length)

    def bring(self, batch: Tensor, rank: int) -> Any:
        """Gather it; see `LoaderBatches.bring`."""
        lane = self._lanes[rank]
        if self._count_writes() != self._versions:
            lane.await_default(lane.copy, lane.device)
            with QUIET:
                written = self.whole(batch)
            return super().bring(written, rank)
        data, rows = self._there[lane.device], super().bring(batch, rank)
        lane.copy.wait_event(data.copied)
        with QUIET:
            made = [tensor.index_select(0, rows) for tensor in data.tensors]
        # The copies may be another rank's, and the tensors the user's, who may let go of them.
        keep_for(lane.copy, data.tensors)
        return made

    def whole(self, batch: Tensor) -> list[Tensor]:
        """The batch as the loader would have made it."""
        return [tensor.index_select(0, batch.to(tensor.device)) for tensor in self._tensors]

    def _count_writes(self) -> list[int]:
        """Writes to the tensors that torch has counted."""
        return [tensor._version for tensor in self._tensors]


def can_gather(loader: object, lanes: Sequence[Lane]) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader's batches can be gathered on these devices, and its tensors fit there.

    They may take half of the memory that is free on each: the rest is training's.
    """
    # One of another class may do more to its batches.
    if type(loader) is not DataLoader or loader.num_workers or not _is_of_tensors(loader):
        return False
    tensors = _tensors_of(loader)
    return (
        loader.batch_sampler is not None
        and all(type(one) is Tensor and one.layout is torch.strided for one in tensors)
        and not any(one.requires_grad or one.is_inference() for one in tensors)
        and all(_has_room(tensors, lane) for lane in lanes)
    )


def _is_of_tensors(loader: DataLoader[Any]) -> bool:
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _tensors_of(loader: DataLoader[Any]) -> Sequence[Tensor]:
    tensors: Sequence[Tensor] = loader.dataset.tensors  # type: ignore[attr-defined]
    return tensors


def _has_room(tensors: Sequence[Tensor], lane: Lane) -> bool:
    memory = read_memory(lane)
    needed = sum(tensor.nbytes for tensor in tensors if tensor.device != lane.device)
    # The peak has the copies of earlier epochs in it, which are gone.
    return memory is not None and fits(replace(memory, peak=0), needed)
