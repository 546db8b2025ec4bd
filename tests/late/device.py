"""Streams, events and devices of an emulated machine: `LateCuda` stands for `torch.cuda`.

A stream is a queue of operations, of marks that events record, and of waits for marks. Whoever waits for a
mark runs what it depends on: the queue before it and, through the waits in there, parts of other queues.

The machine's lock is held while anything is queued or runs. Under it no code of flowdp's runs, but for
finalizers that the garbage collector calls: the lock can be taken again by the thread that has it.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from tests.late.memory import Memory, MemoryTable
from tests.late.orders import LATE, Order

__all__ = ["Clock", "LateCuda", "LateEvent", "LateStream", "Mark"]

Clock = dict["LateStream", int]
"""For each stream, the number of its last operation that is known to be over."""

Site = tuple[str, int]
"""File and line of a call."""


def merge(into: Clock, other: Clock) -> None:
    """Let a clock know all that another one knows."""
    for stream, time in other.items():
        if into.get(stream, -1) < time:
            into[stream] = time


class Mark:
    """A place in a queue.

    Attributes:
        stream: The stream.
        clock: Operations that are over when it has been passed.
        is_passed: Whether the device has passed it.
        at_s: When it did.
    """

    __slots__ = ("at_s", "clock", "is_passed", "stream")

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.clock: Clock = {**stream.clock, stream: stream.time}
        self.is_passed = False
        self.at_s = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """An entry of a queue that lets the stream wait for a mark of another."""

    mark: Mark


Kernel = Callable[[], None]


@dataclass(eq=False, slots=True)
class LateStream:
    """Stands for `torch.cuda.Stream`.

    Attributes:
        cuda: Its machine.
        device: Its device.
        number: Number in the machine.
        priority: As given.
        role: "compute", "comm" or "copy" of a lane, "aside", or "default".
        queue: What has not run yet.
        time: Number of the newest operation.
        clock: What it has waited for.
    """

    cuda: LateCuda
    device: torch.device
    number: int
    priority: int = 0
    role: str = "stream"
    queue: deque[Kernel | Mark | Wait] = field(default_factory=deque)
    time: int = 0
    clock: Clock = field(default_factory=dict)

    @property
    def cuda_stream(self) -> int:
        """The handle, which NCCL is given."""
        return self.number

    def wait_event(self, event: LateEvent) -> None:
        """See `torch.cuda.Stream.wait_event`."""
        if not self.cuda.is_removed(sys._getframe(1)):
            event.wait(self)

    def wait_stream(self, stream: LateStream) -> None:
        """See `torch.cuda.Stream.wait_stream`."""
        self.cuda.wait(self, self.cuda.mark(stream))

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        """See `torch.cuda.Stream.record_event`."""
        event = event or LateEvent(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Run everything on it."""
        if not self.cuda.is_removed(sys._getframe(1)):
            self.cuda.synchronize_stream(self)

    def query(self) -> bool:
        """Whether everything on it has run. The device goes on a little."""
        with self.cuda.lock:
            self.cuda.step()
            return not self.queue

    def __repr__(self) -> str:
        return f"{self.role} {self.number} of {self.device}"


class LateEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, cuda: LateCuda, enable_timing: bool = False) -> None:
        self.cuda = cuda
        self._is_timed = enable_timing
        self._mark: Mark | None = None

    def record(self, stream: LateStream | None = None) -> None:
        """Mark the work on a stream so far.

        Raises:
            RuntimeError: The event was recorded on another device before.
        """
        if self.cuda.is_removed(sys._getframe(1)):
            return
        stream = stream or self.cuda.current_stream()
        if self._mark is not None and self._mark.stream.device != stream.device:
            raise RuntimeError(
                f"Event device {self._mark.stream.device} does not match recording stream's device "
                f"{stream.device}."
            )
        self._mark = self.cuda.mark(stream)

    def wait(self, stream: LateStream | None = None) -> None:
        """Let a stream wait for the mark, if there is one."""
        if self._mark is not None:
            self.cuda.wait(stream or self.cuda.current_stream(), self._mark)

    def synchronize(self) -> None:
        """Run all that the mark depends on."""
        if self._mark is not None and not self.cuda.is_removed(sys._getframe(1)):
            self.cuda.demand(self._mark)

    def query(self) -> bool:
        """Whether the device has passed the mark. It goes on a little."""
        with self.cuda.lock:
            self.cuda.step()
            if self._mark is not None and self._mark.is_passed:
                merge(self.cuda.host, self._mark.clock)
            return self._mark is None or self._mark.is_passed

    def elapsed_time(self, end_event: LateEvent) -> float:
        """Milliseconds to another mark.

        Raises:
            RuntimeError: One of them has no time, or the host has not waited for it.
        """
        start, end = self._mark, end_event._mark
        if start is None or end is None or not (self._is_timed and end_event._is_timed):
            raise RuntimeError("the event has no time: made without timing, or never recorded")
        if not (self.cuda.is_known(start) and self.cuda.is_known(end)):
            raise RuntimeError("device not ready: nobody has waited for the event")
        if start.stream.device != end.stream.device:
            raise RuntimeError("both events must be of one device")
        return (end.at_s - start.at_s) * 1e3


class LateCuda:
    """A machine with CUDA devices that run late; stands for `torch.cuda`.

    Args:
        devices: Number of devices.
        order: Which work runs when.
        total: Bytes of memory of each device.
        used: Bytes of it that other processes use.

    Attributes:
        lock: Guards the queues and the memory, and is held while work runs.
        memory: All memory of the devices.
        host: What the host has waited for. One clock for all threads: what one of them has seen is over.
        generators: Random numbers of each device.
        removed: Places in flowdp's source whose waits are left out.
        executed: Operations that have run.
    """

    def __init__(self, devices: int = 1, order: Order = LATE, total: int = 10**9, used: int = 0) -> None:
        self.lock = threading.RLock()
        self.memory = MemoryTable()
        self.host: Clock = {}
        self.order = order
        self.total, self.used = total, used
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.generators = tuple(torch.Generator() for _ in self.devices)
        self.removed: frozenset[Site] = frozenset()
        self.are_unlike = False  # cards of different kinds
        self.executed = 0
        self._draw = random.Random(order.seed)
        self._streams: list[LateStream] = []
        self._favourites: list[LateStream] = []
        self._runs_now = False  # a favourite is running: the others of them wait for its turn
        self._local = threading.local()
        self._defaults = [self._new_stream(device, role="default") for device in self.devices]

    # ------------------------------------------------------------ interface of torch.cuda
    def Stream(self, device: Any = None, priority: int = 0) -> LateStream:
        return self._new_stream(self.place(device), priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> LateEvent:
        return LateEvent(self, enable_timing)

    def current_device(self) -> int:
        return int(getattr(self._local, "device", 0))

    def current_stream(self, device: Any = None) -> LateStream:
        index = self.place(device).index
        streams: dict[int, LateStream] = getattr(self._local, "streams", {})
        return streams.get(index, self._defaults[index])

    def default_stream(self, device: Any = None) -> LateStream:
        return self._defaults[self.place(device).index]

    @contextmanager
    def stream(self, stream: LateStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with self.device(stream.device):
            index = stream.device.index
            before = self.current_stream(stream.device)
            self._local.streams = {**getattr(self._local, "streams", {}), index: stream}
            try:
                yield
            finally:
                self._local.streams = {**self._local.streams, index: before}

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self._local.device = self.place(device).index
        try:
            yield
        finally:
            self._local.device = before

    def device_count(self) -> int:
        return len(self.devices)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self.place(device).index
        name = f"late device {index}" if self.are_unlike else "late device"
        return SimpleNamespace(name=name, total_memory=self.total, uuid=f"GPU-{index}")

    def can_device_access_peer(self, device: Any, peer: Any) -> bool:
        return True

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        with self.lock:
            allocated = self.memory.allocated(self.place(device))
        return self.total - self.used - allocated, self.total

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        with self.lock:
            allocated = self.memory.allocated(self.place(device))
        names = ("reserved_bytes.all.current", "active_bytes.all.current", "active_bytes.all.peak")
        return dict.fromkeys(names, allocated)

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self, device: Any = None) -> None:
        """Run everything on the streams of a device."""
        place = self.place(device)
        for stream in self._streams:
            if stream.device == place:
                self.synchronize_stream(stream)

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return self.generators[self.place(device).index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "cuda") -> None:
        self.generators[self.place(device).index].set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    # ------------------------------------------------------------ the host's side of the queues
    def place(self, device: Any) -> torch.device:
        """The device that an argument means."""
        if isinstance(device, int):
            return self.devices[device]
        index = None if device is None else torch.device(device).index
        return self.devices[self.current_device() if index is None else index]

    def stream_of(self, handle: int) -> LateStream:
        """The stream with a handle."""
        return self._streams[handle]

    def mark(self, stream: LateStream) -> Mark:
        """Put a mark at the end of a queue."""
        with self.lock:
            mark = Mark(stream)
            stream.queue.append(mark)
            self._go_on()
        return mark

    def wait(self, stream: LateStream, mark: Mark) -> None:
        """Let a stream wait for a mark."""
        with self.lock:
            merge(stream.clock, mark.clock)
            stream.queue.append(Wait(mark))
            self._go_on()

    def enqueue(
        self, stream: LateStream, kernel: Kernel, name: str, uses: Sequence[tuple[Memory, LateStream]]
    ) -> None:
        """Put an operation on a stream.

        Args:
            stream: The stream.
            kernel: Does the work.
            name: Name of the operation.
            uses: Memory that it uses, and the stream for which it does so.
        """
        with self.lock:
            stream.time += 1
            merge(stream.clock, self.host)
            for memory, user in uses:
                self.memory.use(memory, user, name)
            stream.queue.append(kernel)
            self._go_on()

    def demand(self, mark: Mark) -> None:
        """Run all that a mark depends on, and no more than the order says; the host knows it then."""
        with self.lock:
            awaited = [mark]
            while awaited:
                if awaited[-1].is_passed:
                    awaited.pop()
                elif (blocker := self._run_head(awaited[-1].stream)) is not None:
                    awaited.append(blocker)
            merge(self.host, mark.clock)

    def synchronize_stream(self, stream: LateStream) -> None:
        """Run everything on a stream."""
        with self.lock:
            self.demand(self.mark(stream))

    def synchronize_all(self) -> None:
        """Run everything."""
        for stream in list(self._streams):
            self.synchronize_stream(stream)

    def is_known(self, mark: Mark) -> bool:
        """Whether the host has waited for a mark."""
        with self.lock:
            return mark.is_passed and all(
                self.host.get(stream, -1) >= time for stream, time in mark.clock.items()
            )

    def step(self) -> None:
        """Run one operation of a random stream, if there is one that can run: devices never stand still."""
        ready = [stream for stream in self._streams if self._can_run(stream)]
        if ready:
            self._run_head(self._draw.choice(ready))

    def allocate(self, stream: LateStream) -> None:
        """Prepare an allocation of a stream: memory that was freed too early is written over."""
        for memory in self.memory.allocate(stream, self._is_over):
            stream.queue.append(partial(_spoil, memory.elements()))

    def is_removed(self, frame: Any) -> bool:
        """Whether a caller's wait is to be left out."""
        site = frame.f_code.co_filename, frame.f_lineno
        return site in self.removed

    # ------------------------------------------------------------ the devices' side
    def _new_stream(self, device: torch.device, priority: int = 0, role: str = "stream") -> LateStream:
        with self.lock:
            stream = LateStream(self, device, len(self._streams), priority, role)
            self._streams.append(stream)
        self.name(stream, role)
        return stream

    def name(self, stream: LateStream, role: str) -> None:
        """Give a stream a role."""
        stream.role = role
        with self.lock:
            self._favourites = [each for each in self._streams if self.order.first in ("", each.role)]

    def _go_on(self) -> None:
        """Run what the order runs before anybody waits for it."""
        if self._favourites:
            self._run_favourites()
        while self.order.chance and self._draw.random() < self.order.chance:
            self.step()

    def _run_favourites(self) -> None:
        if self._runs_now:
            return
        self._runs_now = True
        try:
            has_run = True
            while has_run:
                has_run = False
                for stream in self._favourites:
                    while self._can_run(stream):
                        self._run_head(stream)
                        has_run = True
        finally:
            self._runs_now = False

    @staticmethod
    def _can_run(stream: LateStream) -> bool:
        if not stream.queue:
            return False
        head = stream.queue[0]
        return not isinstance(head, Wait) or head.mark.is_passed

    def _run_head(self, stream: LateStream) -> Mark | None:
        """Run the first entry of a queue; returns the mark for which it has to wait instead."""
        head = stream.queue[0]
        if isinstance(head, Wait):
            if not head.mark.is_passed:
                return head.mark
            stream.queue.popleft()
            return None
        stream.queue.popleft()
        if isinstance(head, Mark):
            head.is_passed, head.at_s = True, perf_counter()
        else:
            # Below autograd, autocast and all modes: they belong to the thread that called the operation.
            with (
                torch._C._DisableTorchDispatch(),
                torch._C._AutoDispatchBelowADInplaceOrView(),
                torch._C._DisableAutocast(),
            ):
                head()
            self.executed += 1
        if self._favourites:
            self._run_favourites()
        return None

    def _is_over(self, owner: LateStream, user: LateStream, time: int) -> bool:
        return max(owner.clock.get(user, -1), self.host.get(user, -1)) >= time


def _spoil(contents: torch.Tensor) -> None:
    """Overwrite bytes: as numbers of any floating-point type they are NaN."""
    contents.fill_(255)
