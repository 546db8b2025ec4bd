"""Batches of the user's own loader, dealt to the devices and copied there ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from flowdp.data.ring_gauge import RingGauge
from flowdp.data.slots import keep_for
from flowdp.data.trees import tensors_of
from flowdp.data_parallel.balancer import Balancer, SingleDevice
from flowdp.data_parallel.batches import END, Copied, LoaderBatches, may_read_ahead, open_batches, samples_of
from flowdp.data_parallel.windows import Piece, Window
from flowdp.device.failed_device import keep_memory
from flowdp.device.streams import Lane
from flowdp.policy.budget import FIRST_DEPTH, USAGE
from flowdp.threads.inbox import LISTEN_S

__all__ = ["Epoch", "WindowLoader", "Windows", "interleaved"]

WINDOWS_AHEAD = 4
"""Windows ahead, at most, unless the user says so: each is dealt by the speeds that were known then."""


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
        usage: Part of a device that may be in use.
        depth: Windows that are read ahead, at most; None: by the devices' memory.
        copied: Copies of datasets that earlier epochs had on the devices.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        lanes: Sequence[Lane],
        balancer: Balancer | SingleDevice,
        around: Callable[[Iterator[Window]], Iterator[Window]] | None = None,
        *,
        usage: float = USAGE,
        depth: int | None = None,
        copied: Copied | None = None,
    ) -> None:
        self._copied = {} if copied is None else copied
        self._loader = loader
        self._lanes = lanes
        self._balancer = balancer
        self._around = around
        self._usage = usage
        self._depth = depth

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
        batches = open_batches(self._loader, self._lanes, self._usage, self._copied)
        windows = Windows(batches, self._lanes, self._balancer)
        reader = None
        try:
            if may_read_ahead(self._loader):
                reader = WindowLoader(windows, self._lanes, usage=self._usage, depth=self._depth)
            yield from windows if reader is None else reader
        finally:
            keep_memory(self._lanes)
            if reader is not None:
                reader.close()


class Windows:
    """The windows of a loader, each read when it is asked for.

    Args:
        batches: Batches of the loader.
        lanes: One per rank.
        balancer: Asked for each window's shares.

    Attributes:
        is_left: Set it to end a window that is being read with the batch under way.
    """

    def __init__(
        self, batches: LoaderBatches, lanes: Sequence[Lane], balancer: Balancer | SingleDevice
    ) -> None:
        self._batches = batches
        self._lanes = lanes
        self._balancer = balancer
        self.is_left = False

    def __iter__(self) -> Iterator[Window]:
        """The windows, each read in the calling thread. Errors as of `read`."""
        while (window := self.read()) is not None:
            yield window

    def read(self) -> Window | None:
        """The next window; None at the end.

        Raises:
            BaseException: Raised by the loader.
            DataError: It gave a batch without samples.
        """
        home, counts = self._lanes[0].device, self._balancer.quotas()
        if counts is None:
            batch = self._batches.next()
            if batch is END:
                return None
            pieces = self._shards(batch)
            whole = partial(self._batches.whole, batch) if len(pieces) > 1 else None
            return Window(pieces, home, whole)
        pieces = []
        for rank in interleaved(counts, self._balancer.due()):
            batch = self._batches.next()
            if batch is END or self.is_left:
                break
            batch = self._batches.own(batch)  # the whole window is read before any of it is used
            pieces.append(self._piece(rank, batch, samples_of(batch)))
        return Window(pieces, home) if pieces else None

    def _shards(self, batch: Any) -> list[Piece]:
        samples = samples_of(batch)
        sizes = self._balancer.cut(samples)
        ranks = [rank for rank, size in enumerate(sizes) if size]
        if len(ranks) == 1:  # whole: it need not be one that can be cut
            return [self._piece(ranks[0], batch, samples)]
        parts = self._batches.parts(batch, [sizes[rank] for rank in ranks])
        return [self._piece(rank, part, sizes[rank]) for rank, part in zip(ranks, parts, strict=True)]

    def _piece(self, rank: int, batch: Any, samples: int) -> Piece:
        lane = self._lanes[rank]
        if not lane.is_async:
            return Piece(rank, self._batches.bring(batch, rank), samples)
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


class WindowLoader:
    """Reads windows in a thread of its own, ahead of the one that is in use.

    One window ahead, until the devices' memory has been measured beside a step; then as many as it allows.

    Args:
        windows: Windows to read.
        lanes: One per rank.
        usage: Part of a device that may be in use.
        depth: Windows that are read ahead, at most; None: by the devices' memory.

    Threads: iterate it, once, and `close` it in the thread that made it.
    """

    def __init__(
        self, windows: Windows, lanes: Sequence[Lane], *, usage: float = USAGE, depth: int | None = None
    ) -> None:
        self._windows = windows
        self._lanes = lanes
        limit = WINDOWS_AHEAD if depth is None else depth
        self._first = min(limit, FIRST_DEPTH)
        self._read: SimpleQueue[Window | BaseException | None] = SimpleQueue()  # None: the loader's end
        self._wanted: SimpleQueue[bool] = SimpleQueue()  # an entry for each window to read; False: no more
        self._rings: list[_WindowsAhead] = []
        self._gauges: list[RingGauge] = []
        for device in dict.fromkeys(lane.device for lane in lanes if lane.is_async):
            ranks = [rank for rank, lane in enumerate(lanes) if lane.is_async and lane.device == device]
            self._rings.append(_WindowsAhead(ranks, self._first, self._read.qsize))
            self._gauges.append(RingGauge(lanes[ranks[0]], usage=usage, limit=limit))
            self._gauges[-1].join(self._rings[-1])
        self._thread = threading.Thread(target=self._run, name="flowdp-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Window]:
        """The windows; each is the caller's until the next is requested. Errors as of `Windows.read`."""
        asked = 0  # windows that are being read, or lie ready
        while True:
            if asked == 0:
                self._wanted.put(True)
                asked = 1
            window = self._next()
            if window is None:
                return
            asked -= 1
            # The gauges were read just before this window.
            depth = min((ring.depth for ring in self._rings), default=self._first)
            while asked < depth:
                self._wanted.put(True)
                asked += 1
            yield window
            for gauge in self._gauges:
                gauge.trained(0)

    def close(self) -> None:
        """Stop reading, and wait for the batch that is being read."""
        self._windows.is_left = True
        self._wanted.put(False)
        self._thread.join()
        for gauge in self._gauges:
            gauge.close()

    def _next(self) -> Window | None:
        while True:
            try:
                window = self._read.get(timeout=LISTEN_S)  # a Ctrl-C comes between two of them
            except Empty:
                continue
            if isinstance(window, BaseException):
                raise window
            return window

    def _run(self) -> None:
        try:
            while self._wanted.get() and not self._windows.is_left:
                for gauge in self._gauges:
                    gauge.look(0)
                window = self._windows.read()
                if window is not None:
                    for ring in self._rings:
                        ring.batch_bytes = window.bytes_of(ring.ranks)
                self._read.put(window)
                if window is None:
                    return
        except BaseException as error:
            keep_memory(self._lanes)
            self._read.put(error)


@dataclass(slots=True)
class _WindowsAhead:
    """The windows ahead on one device, for its gauge; see `Ring`.

    Those that have been read are not given back: a loader deals each batch once.

    Attributes:
        ranks: Ranks of the device.
        depth: Windows that the device allows.
        count: Number of windows that lie ready.
        batch_bytes: Size of the last window there.
    """

    ranks: Collection[int]
    depth: int
    count: Callable[[], int]
    batch_bytes: int = 0

    @property
    def ahead(self) -> int:
        """Windows that lie ready; see `Ring.ahead`."""
        return self.count()

    def resize(self, depth: int) -> bool:
        """Allow so many windows ahead from now on; see `Ring.resize`."""
        self.depth = depth
        return False
