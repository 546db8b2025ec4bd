"""Batches of the user's own loader, dealt to the devices and copied there ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any

from torch.utils.data import DataLoader, TensorDataset, default_collate

from flowdp.data.batches import Portion
from flowdp.data.memory import OwnMemory
from flowdp.data.processes import starting
from flowdp.data.slots import own_memory
from flowdp.data.trees import batch_length, tensors_of, tree_map
from flowdp.data_parallel.balancer import Balancer, SingleDevice
from flowdp.data_parallel.windows import Piece, Window
from flowdp.device.accelerator import is_accelerator
from flowdp.device.streams import Lane
from flowdp.errors import DataError
from flowdp.threads.inbox import LISTEN_S

__all__ = ["Epoch", "WindowLoader", "Windows", "interleaved", "may_read_ahead", "samples_of"]


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
        balancer: Asked for each window's shares.
        around: Passes the windows on, and does what is to be done behind the last; None: nothing is.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        lanes: Sequence[Lane],
        balancer: Balancer | SingleDevice,
        around: Callable[[Iterator[Window]], Iterator[Window]] | None = None,
    ) -> None:
        self._loader = loader
        self._lanes = lanes
        self._balancer = balancer
        self._around = around

    def __len__(self) -> int:
        """Number of windows; TypeError where a cadence sizes them, or the loader has no length."""
        counts = self._balancer.quotas()
        if counts is not None and len(counts) > 1:
            raise TypeError("a cadence sizes the windows as the epoch goes: their number is not known")
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Window]:
        """The windows; errors of the loader are raised here."""
        return self._windows() if self._around is None else self._around(self._windows())

    def _windows(self) -> Iterator[Window]:
        if len(self._lanes) == 1 and not self._lanes[0].is_async:
            # Nothing to copy and no other device: a thread would only cost.
            for batch in self._loader:
                yield Window([Piece(0, batch, samples_of(batch))], self._lanes[0].device)
            return
        windows = Windows(self._loader, self._lanes, self._balancer)
        if not may_read_ahead(self._loader):
            while (window := windows.read()) is not None:
                yield window
            return
        reader = WindowLoader(windows)
        try:
            yield from reader
        finally:
            reader.close()


def may_read_ahead(loader: object) -> bool:
    """Whether a thread may ask for batches while the user's thread does anything else.

    Two threads that read one file through a dataset get wrong samples without an error, and the loop around
    an epoch may read the same files, to evaluate, say. So a dataset's own code runs in the user's thread, as
    it does without flowdp, or in worker processes.
    """
    if not isinstance(loader, DataLoader):
        return isinstance(loader, (list, tuple))
    is_plain = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
    return loader.num_workers > 0 or is_plain


class Windows:
    """The windows of a loader, each read when it is asked for.

    Args:
        loader: Any iterable of batches. Its iterator is made here, by the calling thread, as worker processes
            want it.
        lanes: One per rank.
        balancer: Asked for each window's shares.

    Attributes:
        is_left: Set it to end a window that is being read with the batch under way.
    """

    def __init__(
        self, loader: Iterable[Any], lanes: Sequence[Lane], balancer: Balancer | SingleDevice
    ) -> None:
        has_processes = isinstance(loader, DataLoader) and loader.num_workers > 0
        with starting() if has_processes else nullcontext():
            self._batches = iter(loader)
        self._memory = None if may_read_ahead(loader) else OwnMemory()
        self._lanes = lanes
        self._balancer = balancer
        self.is_left = False

    def read(self) -> Window | None:
        """The next window; None at the end.

        Raises:
            BaseException: Raised by the loader.
            DataError: It gave a batch without samples.
        """
        home, counts = self._lanes[0].device, self._balancer.quotas()
        if counts is None:
            batch = next(self._batches, _END)
            if batch is _END:
                return None
            pieces = self._shards(batch)
            return Window(pieces, home, batch if len(pieces) > 1 else None)
        pieces = []
        for rank in interleaved(counts, self._balancer.due()):
            batch = next(self._batches, _END)
            if batch is _END or self.is_left:
                break
            if self._memory is not None:  # the whole window is read before any of it is used
                batch = self._memory.own(batch, "a batch of the loader")
            pieces.append(self._piece(rank, batch, samples_of(batch)))
        return Window(pieces, home) if pieces else None

    def _shards(self, batch: Any) -> list[Piece]:
        samples = samples_of(batch)
        sizes = self._balancer.cut(samples)
        if max(sizes) == samples:  # whole: it need not be one that can be cut
            return [self._piece(rank, batch, size) for rank, size in enumerate(sizes) if size]
        portion = Portion.of(batch, samples)
        return [
            self._piece(rank, portion.rows(stop - size, stop), size)
            for rank, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True))
            if size
        ]

    def _piece(self, rank: int, batch: Any, samples: int) -> Piece:
        lane = self._lanes[rank]
        if not lane.is_async:
            return Piece(rank, batch, samples)
        copied = lane.event()
        with lane.on(lane.copy):
            there = tree_map(lambda leaf: own_memory(leaf, lane), batch)
            copied.record(lane.copy)

        def arrive() -> None:
            stream = lane.current()
            stream.wait_event(copied)
            for leaf in tensors_of(there):
                if is_accelerator(leaf.device):
                    leaf.record_stream(stream)  # type: ignore[arg-type]

        return Piece(rank, there, samples, arrive)


class WindowLoader:
    """Reads windows in a thread of its own, one ahead of the one that is in use.

    Args:
        windows: Windows to read.

    Threads: iterate it and `close` it in the thread that made it.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._ready: SimpleQueue[Window | BaseException | None] = SimpleQueue()
        self._wanted = threading.Semaphore(2)  # windows: one in use, one that lies ready
        self._thread = threading.Thread(target=self._read, name="flowdp-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Window]:
        """The windows; each is the caller's until the next is requested. Errors as of `Windows.read`."""
        while True:
            window = self._next()
            if window is None:
                return
            if isinstance(window, BaseException):
                raise window
            yield window
            self._wanted.release()

    def close(self) -> None:
        """Stop reading, and wait for the batch that is being read."""
        self._windows.is_left = True
        self._wanted.release()
        self._thread.join()

    def _next(self) -> Window | BaseException | None:
        while True:
            try:
                return self._ready.get(timeout=LISTEN_S)
            except Empty:
                pass

    def _read(self) -> None:
        try:
            while True:
                self._wanted.acquire()
                if self._windows.is_left:
                    return
                window = self._windows.read()
                self._ready.put(window)
                if window is None:
                    return
        except BaseException as error:
            self._ready.put(error)


_END = object()


def samples_of(batch: Any) -> int:
    """Samples of a batch.

    Raises:
        DataError: It has none.
    """
    samples = batch_length(batch)
    if not samples:
        raise DataError(f"the loader gave a batch without samples: {batch!r:.100}")
    return samples
