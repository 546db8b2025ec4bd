"""Batches of the user's own loader, dealt to the devices and copied there ahead of their use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader

from flowdp.data.batches import cloned, makes_new
from flowdp.data.moving import keep_for
from flowdp.data.processes import starting
from flowdp.data.staging import Staging
from flowdp.data_parallel.windows import Piece, Window
from flowdp.device.memory import keep_memory
from flowdp.device.streams import Lane
from flowdp.device.trees import batch_length, flatten, tensors_of, unflatten
from flowdp.errors import DataError
from flowdp.policy.cadence import Cadence

__all__ = ["Epoch", "interleaved", "set_epoch"]


def interleaved(counts: Sequence[int], due: Collection[int] = ()) -> list[int]:
    """The ranks of a window's batches, in the order in which they would finish them.

    So a window that the end of the data cuts short is still shared by speed.

    Args:
        counts: Batches per rank. Shape (world_size,).
        due: Ranks that have their first batch before any other.
    """
    ends = sorted(
        (0.0 if number == 0 and rank in due else (number + 1) / count, rank)
        for rank, count in enumerate(counts)
        for number in range(count)
    )
    return [rank for _, rank in ends]


class Epoch:
    """One pass over a loader, in windows: iterate it once.

    Args:
        loader: Any iterable of batches.
        lanes: One per rank.
        cadence: Sizes windows of whole batches; None: each window is one batch, which is cut when it is
            processed.
    """

    def __init__(self, loader: Iterable[Any], lanes: Sequence[Lane], cadence: Cadence | None = None) -> None:
        self._loader = loader
        self._lanes = lanes
        self._cadence = cadence
        self._is_copied = any(lane.is_async for lane in lanes) and (cadence is not None or len(lanes) == 1)
        self._staging = [Staging(lane) for lane in lanes]

    def __len__(self) -> int:
        """Number of windows; TypeError where a cadence sizes them, or the loader has no length."""
        if self._cadence is not None:
            raise TypeError("a cadence sizes the windows as the epoch goes: their number is not known")
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Window]:
        """The windows; errors of the loader are raised here."""
        for lane in self._lanes:
            lane.await_caller(lane.copy)  # the batches may be there already
        with starting():
            batches = iter(self._loader)  # worker processes are started by the calling thread
        windows = self._windows(batches)
        if self._is_copied and _may_read_ahead(self._loader):
            windows = _ahead(windows)
        try:
            yield from windows
        finally:
            keep_memory(self._lanes)

    def _windows(self, batches: Iterator[Any]) -> Iterator[Window]:
        """The windows, each read when it is asked for.

        Raises:
            BaseException: Raised by the loader.
            DataError: It gave a batch without samples.
        """
        home = self._lanes[0].device
        if self._cadence is None:
            for batch in batches:
                yield Window([self._piece(0, batch)], home)
            return
        is_new = makes_new(self._loader)
        while True:
            ranks = interleaved(self._cadence.quotas, self._cadence.due)
            pieces = [
                self._piece(rank, batch if is_new else cloned(batch))  # a window is read before it is used
                for rank, batch in zip(ranks, batches, strict=False)
            ]
            if not pieces:
                return
            yield Window(pieces, home)

    def _piece(self, rank: int, batch: Any) -> Piece:
        """A batch on its way to a rank's device, through pinned memory; one that is to be cut stays.

        Raises:
            DataError: It has no samples.
        """
        samples = batch_length(batch)
        if not samples:
            raise DataError(f"the loader gave a batch without samples: {batch!r:.100}")
        lane = self._lanes[rank]
        if not (self._is_copied and lane.is_async):
            return Piece(rank, batch, samples)
        copied = lane.event()
        if any(tensor.device == lane.device for tensor in tensors_of(batch)):
            lane.await_caller(lane.copy)  # the loader has made them, in this thread
        with lane.on(lane.copy):
            leaves, form = flatten(batch)
            there = unflatten(self._staging[rank].bring(leaves), form)
            copied.record(lane.copy)

        def arrive() -> None:
            stream = lane.current()
            stream.wait_event(copied)
            keep_for(stream, tensors_of(there))

        return Piece(rank, there, samples, arrive)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader and its samplers, where they have it."""
    for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(tell := getattr(owner, "set_epoch", None)):
            tell(epoch)


def _may_read_ahead(loader: object) -> bool:
    """Whether a thread may ask for batches while the user's thread does anything else.

    Two threads that read one file through a dataset get wrong samples without an error, and the loop around
    an epoch may read the same files, to evaluate, say. So a dataset's own code runs in the user's thread, as
    it does without flowdp, or in worker processes.
    """
    return isinstance(loader, list | tuple) or (isinstance(loader, DataLoader) and loader.num_workers > 0)


def _ahead(windows: Iterator[Window]) -> Iterator[Window]:
    """The windows, one of them read ahead by a thread."""
    with ThreadPoolExecutor(1, "flowdp-loader") as reader:
        coming = reader.submit(next, windows, None)
        while (window := coming.result()) is not None:
            coming = reader.submit(next, windows, None)
            yield window
