"""Batches of the user's own loader, dealt to the devices and copied there ahead of their use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from flowdp.data.batches import Portion
from flowdp.data.memory import OwnMemory
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

__all__ = ["WINDOWS_AHEAD", "Epoch", "interleaved"]

T = TypeVar("T")

WINDOWS_AHEAD = 1
"""Windows ahead, unless the user says so. One may be many batches, and each is dealt by the speeds that were
known when it was read."""


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
        loader, lanes = self._loader, self._lanes
        if len(lanes) == 1 and not lanes[0].is_async:
            # Nothing to copy and no other device: a thread would only cost.
            for batch in loader:
                yield Window([Piece(0, batch, samples_of(batch))], lanes[0].device)
            return
        batches = (
            ResidentBatches(loader, lanes) if can_gather(loader, lanes) else LoaderBatches(loader, lanes)
        )
        is_safe, is_left = may_read_ahead(loader), threading.Event()
        windows = self._read(batches, None if is_safe else OwnMemory(), is_left)
        reader = ThreadPoolExecutor(1, "flowdp-loader")  # it has a thread when it is asked for a window
        ahead = deque(reader.submit(next, windows, None) for _ in range(self._depth if is_safe else 0))
        try:
            while True:
                if ahead:
                    ahead.append(reader.submit(next, windows, None))
                    window = _result(ahead.popleft())
                else:
                    window = next(windows, None)
                if window is None:
                    return
                yield window
        finally:
            keep_memory(lanes)
            is_left.set()
            reader.shutdown(cancel_futures=True)

    def _read(
        self, batches: LoaderBatches, memory: OwnMemory | None, is_left: threading.Event
    ) -> Iterator[Window]:
        """The windows, each read when it is asked for; once `is_left`, no further batch.

        Raises:
            BaseException: Raised by the loader.
            DataError: It gave a batch without samples, or has written to one that it gave before.
        """
        while (counts := self._balancer.quotas()) is not None:
            pieces = []
            for rank, batch in zip(interleaved(counts, self._balancer.due()), batches, strict=False):
                if is_left.is_set():
                    return
                if memory is not None:  # the whole window is read before any of it is used
                    batch = memory.own(batch, "a batch of the loader")
                pieces.append(batches.piece(rank, batch, samples_of(batch)))
            if not pieces:
                return
            yield Window(pieces, self._lanes[0].device)
        for batch in batches:
            yield self._cut(batches, batch)

    def _cut(self, batches: LoaderBatches, batch: Any) -> Window:
        samples, home = samples_of(batch), self._lanes[0].device
        sizes = self._balancer.cut(samples)
        ranks = [rank for rank, size in enumerate(sizes) if size]
        if len(ranks) == 1:  # whole: it need not be one that can be cut
            return Window([batches.piece(ranks[0], batch, samples)], home)
        portion, stops = Portion.of(batch, samples), list(accumulate(sizes))
        pieces = [
            batches.piece(rank, portion.rows(stops[rank] - sizes[rank], stops[rank]), sizes[rank])
            for rank in ranks
        ]
        return Window(pieces, home, partial(batches.whole, batch))


def _result(asked: Future[T]) -> T:
    while not asked.done():
        wait([asked], LISTEN_S)  # a Ctrl-C comes between two of them
    return asked.result()
