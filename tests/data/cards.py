"""A fake card: a `FakeCuda` with its own memory, on which every slot of a feed is watched.

Memory allocated under a stream is watched from then on; on `copy`, in parallel with the worker, allocating
takes `QUIET`. Pinned memory is written by the host, whatever stream is current; such a write is recorded on a
stream that the host has always waited for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowdp.device.streams import QUIET, Event, StreamLane
from flowdp.policy.worth import LaunchWatch
from flowdp.replica import build, factories
from tests.fakes import Access, FakeCuda, FakeEvent, FakeStream, Watched, merge
from tests.limits import HANG_S

NEAR = torch.device("cpu", 0)


class _Event(FakeEvent):
    def record(self, stream: FakeStream | None = None) -> None:
        super().record(stream)
        assert isinstance(self.cuda, Card)
        self.cuda._told()

    def synchronize(self) -> None:
        assert isinstance(self.cuda, Card)
        self.cuda.waiters.add(threading.current_thread().name)
        if self not in self.cuda.deaf:
            super().synchronize()


class _Stream(FakeStream):
    def wait_event(self, event: FakeEvent) -> None:
        assert isinstance(self.cuda, Card)
        if self not in self.cuda.deaf:
            super().wait_event(event)


class Card(FakeCuda):
    """Stands for `torch.cuda` with one device.

    Args:
        total: Bytes of the device.
        used: Bytes of it used by other processes.
        room: Bytes that can be allocated under streams before it is out of memory.

    Attributes:
        deaf: Streams and events that do not wait, to show that each wait is needed.
        waiters: Names of the threads that waited for an event.
        allocated: Bytes of device memory that are allocated under streams.
        refused: Number of allocations without room.
    """

    def __init__(self, total: int = 10**9, used: int = 0, room: int = 10**12) -> None:
        super().__init__()
        self.total, self.used, self.room = total, used, room
        self.deaf: set[Any] = set()
        self.waiters: set[str] = set()
        self.recorded = threading.Condition()
        self.allocated = self.refused = 0
        self.peaks_reset = 0
        self.emptied = 0
        self.host_stream = FakeStream(self, None, 0)
        self.host_stream.name = "the host"
        self._pinned: list[tuple[int, int]] = []
        self._freed: dict[FakeStream, list[Watched]] = {}
        self._pinning = threading.local()

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return _Stream(self, device, priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return _Event(self, enable_timing, blocking)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for a condition that becomes true when an event is recorded, or an allocation is refused."""
        with self.recorded:
            assert self.recorded.wait_for(happened, timeout=HANG_S)

    def _told(self) -> None:
        with self.recorded:
            self.recorded.notify_all()

    # ------------------------------------------------------------ memory
    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.total - self.used - self.allocated, self.total

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.allocated,
            "active_bytes.all.current": self.allocated,
            "active_bytes.all.peak": self.allocated,
        }

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peaks_reset += 1

    def empty_cache(self) -> None:
        self.emptied += 1

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert QUIET.locked(), "memory is pinned while a collective may be launched"
        self.captures.unsafe("pinned memory")
        self._pinning.now = True
        try:
            memory = torch.empty(tuple(shape), dtype=dtype)
        finally:
            self._pinning.now = False
        self.watch("pinned memory", memory)
        with self.lock:
            self._pinned.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    def access(self, stream: FakeStream, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        if what.startswith("aten.empty"):
            if writes[0].device.type == "cpu" and not getattr(self._pinning, "now", False):
                assert stream.name != "copy" or QUIET.locked(), "allocated while a collective may be launched"
                if stream.name == "copy":
                    self.captures.unsafe("allocated memory")
                self._allocate(writes[0], stream)
            return
        if any(start <= tensor.data_ptr() < stop for tensor in writes for start, stop in self._pinned):
            super().access(self.host_stream, what, reads, writes)
            self.host_stream.synchronize()
        else:
            super().access(stream, what, reads, writes)

    def _allocate(self, memory: Tensor, stream: FakeStream) -> None:
        with self.lock:
            if self.allocated + memory.nbytes > self.room:
                self.refused += 1
                self._told()
                raise torch.OutOfMemoryError("the fake card is full")
            self.allocated += memory.nbytes
            stream.time += 1
            merge(stream.clock, self.host)
            for freed in self._freed.pop(stream, ()):  # it may be any of these
                access = Access(stream, stream.time, freed.start, freed.stop, "the next batch")
                self.check(freed, access, is_write=True)
            start = memory.data_ptr()
            watched = Watched("a slot", start, start + memory.nbytes, None)
            self.watched.append(watched)
        weakref.finalize(memory, self._free, watched, stream)

    def _free(self, watched: Watched, stream: FakeStream) -> None:
        """Give memory back to the stream that has allocated it, for what it allocates next."""
        with self.lock:
            self.allocated -= watched.stop - watched.start
            if stream.name == "copy":  # scratch elsewhere goes behind a wait of the host's
                self._freed.setdefault(stream, []).append(watched)
            self.watched.remove(watched)


class CardLane(StreamLane):
    """A rank on a fake card. `NEAR` is the CPU, by another name than that of plain tensors."""

    def __init__(self, card: Card | None = None, device: torch.device = NEAR) -> None:
        self.card = card or Card()
        super().__init__(device, self.card)
        self.compute.name, self.copy.name = "compute", "copy"  # type: ignore[attr-defined]
        self.made: list[Event] = []

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.card.pinned(shape, dtype)

    def event(self, *, timing: bool = False) -> Event:
        self.made.append(super().event(timing=timing))
        return self.made[-1]


def put_on_streams(card: Card, replace: Callable[[Any, str, Any], object] = setattr) -> None:
    """Let ranks on the CPU run on fake streams, as CUDA devices would run them, with replicas watched.

    Args:
        card: The card of all ranks.
        replace: Replaces an attribute of a module.
    """

    def flatten(*parts: Any, **options: Any) -> Any:
        replicas = factories.flatten(*parts, **options)
        for replica in replicas:
            card.watch(f"rank {replica.rank}", *replica.memories)
        return replicas

    def lane_of(device: torch.device) -> StreamLane:
        lane = StreamLane(device, card)
        lane.copy.name = "copy"  # type: ignore[attr-defined]
        return lane

    replace(build, "open_lanes", lambda devices: [lane_of(device) for device in devices])
    # Times of fake streams are those of the host, so whether steps are captured would be a matter of chance.
    replace(LaunchWatch, "take", lambda watch, launch_ms, device_ms: None)
    replace(build, "flatten", flatten)
