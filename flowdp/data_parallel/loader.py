"""Batches of the user's own loader, dealt to the devices and copied there ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any

import torch

from flowdp.data.batches import Portion
from flowdp.data.memory import OwnMemory
from flowdp.data.slots import keep_for
from flowdp.data.trees import tensors_of
from flowdp.data_parallel.balancer import Balancer, SingleDevice
from flowdp.data_parallel.batches import (
    LoaderBatches,
    ResidentBatches,
    can_gather,
    may_read_ahead,
    samples_of,
)
from flowdp.data_parallel.windows import Piece, Window
from flowdp.device.failed_device import keep_memory
from flowdp.device.streams import Lane
from flowdp.threads.inbox import LISTEN_S

__all__ = ["WINDOWS_AHEAD", "Epoch", "Windows", "interleaved"]

WINDOWS_AHEAD = 2
"""Windows ahead, unless the user says so: each is dealt by the speeds that were known then."""

END = object()
"""Behind the last batch of a loader."""


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
        around: Passes the windows on, and does what is to be done behind the last.
        depth: Windows that are read ahead, where a thread may read the loader.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        lanes: Sequence[Lane],
        balancer: Balancer | SingleDevice,
        around: Callable[[Iterable[Window]], Iterator[Window]] = iter,
        *,
        depth: int = WINDOWS_AHEAD,
    ) -> None:
        self._loader = loader
        self._lanes = lanes
        self._balancer = balancer
        self._around = around
        self._depth = depth

    def __len__(self) -> int:
        """Number of windows; TypeError where a cadence sizes them, or the loader has no length."""
        counts = self._balancer.quotas()
        if counts is not None and len(counts) > 1:
            raise TypeError("a cadence sizes the windows as the epoch goes: their number is not known")
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Window]:
        """The windows; errors of the loader are raised here."""
        return self._around(self._windows())

    def _windows(self) -> Iterator[Window]:
        if len(self._lanes) == 1 and not self._lanes[0].is_async:
            # Nothing to copy and no other device: a thread would only cost.
            for batch in self._loader:
                yield Window([Piece(0, batch, samples_of(batch))], self._lanes[0].device)
        else:
            yield from Windows(self._loader, self._lanes, self._balancer, self._depth)


class Windows:
    """The windows of a loader.

    Where a thread may read ahead, one does: it begins with the first window, and ends with the iteration.

    Args:
        loader: Any iterable of batches.
        lanes: One per rank.
        balancer: Asked for each window's shares.
        depth: Windows that are read ahead, where a thread may read the loader; 0: none.

    Threads: iterate it, once, in the thread that made it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        lanes: Sequence[Lane],
        balancer: Balancer | SingleDevice,
        depth: int = 0,
    ) -> None:
        self._batches = (
            ResidentBatches(loader, lanes) if can_gather(loader, lanes) else LoaderBatches(loader, lanes)
        )
        self._lanes = lanes
        self._balancer = balancer
        is_shared = may_read_ahead(loader)
        self._memory = None if is_shared else OwnMemory()
        self._depth = depth if is_shared else 0
        self._room = threading.Semaphore(depth)  # for windows ahead
        self._ready: SimpleQueue[Window | BaseException | None] = SimpleQueue()  # None: the loader's end
        self._is_left = False

    def __iter__(self) -> Iterator[Window]:
        """The windows; each is the caller's until the next is requested. Errors as of `read`."""
        thread = None
        if self._depth:
            thread = threading.Thread(target=self._run, name="flowdp-loader", daemon=True)
            thread.start()
        take = self.read if thread is None else self._take
        try:
            while (window := take()) is not None:
                self._room.release()
                yield window
        finally:
            keep_memory(self._lanes)
            self._is_left = True  # a window that is being read ends with the batch under way
            self._room.release()
            if thread is not None:
                thread.join()

    def read(self) -> Window | None:
        """The next window, read in the calling thread; None at the end.

        Raises:
            BaseException: Raised by the loader.
            DataError: It gave a batch without samples, or has written to one that it gave before.
        """
        home, counts = self._lanes[0].device, self._balancer.quotas()
        if counts is None:
            batch = next(self._batches, END)
            return None if batch is END else self._cut(batch, home)
        pieces: list[Piece] = []
        for rank in interleaved(counts, self._balancer.due()):
            batch = next(self._batches, END)
            if batch is END or self._is_left:
                break
            if self._memory is not None:  # the whole window is read before any of it is used
                batch = self._memory.own(batch, "a batch of the loader")
            pieces.append(self._piece(rank, batch, samples_of(batch)))
        return Window(pieces, home) if pieces else None

    def _cut(self, batch: Any, home: torch.device) -> Window:
        samples = samples_of(batch)
        sizes = self._balancer.cut(samples)
        ranks = [rank for rank, size in enumerate(sizes) if size]
        if len(ranks) == 1:  # whole: it need not be one that can be cut
            return Window([self._piece(ranks[0], batch, samples)], home)
        portion = Portion.of(batch, samples)
        pieces = [
            self._piece(rank, portion.rows(stop - sizes[rank], stop), sizes[rank])
            for rank, stop in enumerate(accumulate(sizes))
            if sizes[rank]
        ]
        return Window(pieces, home, partial(self._batches.whole, batch))

    def _piece(self, rank: int, batch: Any, samples: int) -> Piece:
        lane = self._lanes[rank]
        if not lane.is_async:
            return Piece(rank, batch, samples)
        copied = lane.event()
        if any(tensor.device == lane.device for tensor in tensors_of(batch)):
            lane.await_caller(lane.copy)  # the loader has made them, in this thread
        with lane.on(lane.copy):
            there = self._batches.bring(batch, rank)
            copied.record(lane.copy)

        def arrive() -> None:
            stream = lane.current()
            stream.wait_event(copied)
            keep_for(stream, tensors_of(there))

        return Piece(rank, there, samples, arrive)

    def _take(self) -> Window | None:
        """The next window that the thread has read."""
        while True:
            try:
                window = self._ready.get(timeout=LISTEN_S)  # a Ctrl-C comes between two of them
            except Empty:
                continue
            if isinstance(window, BaseException):
                raise window
            return window

    def _run(self) -> None:
        """Read windows, in a thread of its own."""
        try:
            while self._room.acquire() and not self._is_left:
                window = self.read()
                self._ready.put(window)
                if window is None:
                    return
        except BaseException as error:
            keep_memory(self._lanes)
            self._ready.put(error)
