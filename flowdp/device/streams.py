"""Streams of one rank, and events between them.

A rank on an accelerator has three: `compute` for everything the user's code does, `comm` (high priority) for
averaging, `copy` for prefetch. No work goes to CUDA's default stream, which every other stream would wait for
(on XPU it is a stream like others, and torch may hand it out as one of the three). Where one
stream reads the results of another, an event orders them: it is recorded on the first and the second waits
for it, on the device, without the host. A CPU rank has the same names with nothing behind them, because its
work is done when the call returns; so the code that orders streams runs, and is tested, without a GPU.

All of a device module (`torch.cuda`, `torch.xpu`) that orders work is called here.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from flowdp.device.accelerator import default_stream, device_module, is_accelerator

__all__ = ["QUIET", "Event", "HostLane", "Lane", "Stream", "StreamLane", "open_lanes"]

QUIET = threading.Lock()
"""Held while a grouped collective is launched, and by a thread that allocates, pins or launches for the first
time beside the workers (which stand in the gate then). Between the first and the last launch of a group, each
of these can wait for a kernel that waits for a launch behind it. One for the process: runs share the
driver."""


class Event(Protocol):
    """A mark on a stream; `torch.cuda.Event` is one."""

    def record(self, stream: Any = None) -> None:
        """Mark the work on the stream so far."""
        ...

    def synchronize(self) -> None:
        """Wait, on the host and without the interpreter lock, until the device has passed the mark."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark; does not wait.

        Raises:
            RuntimeError: The device has failed.
        """
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this mark to another; both must have been passed."""
        ...


class Stream(Protocol):
    """A queue of work on a device; `torch.cuda.Stream` is one."""

    def wait_event(self, event: Any) -> None:
        """Let later work on this stream wait for a mark on another one."""
        ...

    def synchronize(self) -> None:
        """Wait, on the host and without the interpreter lock, until everything on it is done."""
        ...

    def query(self) -> bool:
        """Whether everything on it is done; does not wait.

        Raises:
            RuntimeError: The device has failed.
        """
        ...


class Lane:
    """One rank's place on its device.

    Args:
        device: An accelerator with its index, or the CPU.
        module: Module that drives it: `torch.cuda` for a CUDA device.

    Attributes:
        device: As given.
        device_module: As given.
        compute: The user's code: forward, backward, optimizer step.
        comm: Averaging.
        copy: Prefetch.
        is_async: Whether a call returns before its work is done.
    """

    is_async: bool

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self.device_module = module
        self.compute: Stream = module.Stream(device=device)
        self.comm: Stream = module.Stream(device=device, priority=-1)
        self.copy: Stream = module.Stream(device=device)
        # Guards them, and a mark between its record and the wait for it: several threads may ask at once.
        self._asking = threading.Lock()
        self._aside: dict[int, Stream] = {}
        self._marks: dict[object, Event] = {}
        self._defaults: dict[torch.device, Stream] = {}

    @property
    def kind(self) -> str:
        """Name of the device's model: devices of one kind round alike, on one machine and on several."""
        return str(self.device_module.get_device_properties(self.device).name)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make the device and this stream the calling thread's current ones."""
        context: AbstractContextManager[Any] = self.device_module.stream(stream)
        return context

    def aside(self, number: int) -> Stream:
        """A further stream, made once for each number: for copies that must not queue behind `comm`."""
        with self._asking:
            if number not in self._aside:
                self._aside[number] = self.device_module.Stream(device=self.device, priority=-1)
            return self._aside[number]

    def event(self, *, timing: bool = False) -> Event:
        """A new mark; make it once and record it again and again.

        A host that waits for one of CUDA sleeps instead of spinning.

        Args:
            timing: Whether `elapsed_time` will be asked.
        """
        # Others have no such choice.
        choices = {"blocking": True} if self.device.type == "cuda" else {}
        with self.device_module.device(self.device):
            event: Event = self.device_module.Event(enable_timing=timing, **choices)
        return event

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to by itself. Hold `QUIET`."""
        # Said, because a user's default device may be another.
        is_pinned = is_accelerator(self.device)
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=is_pinned)

    def current(self) -> Stream:
        """The calling thread's current stream on the device."""
        stream: Stream = self.device_module.current_stream(self.device)
        return stream

    def await_caller(self, stream: Stream | None = None) -> None:
        """Let a stream (None: `compute`) wait for the calling thread's work so far: the user's tensors."""
        self._await(stream or self.compute, self.current(), "caller")

    def has_failed(self) -> bool:
        """Whether the device has failed for good: each call that uses it raises."""
        try:
            self.compute.query()
        except RuntimeError:
            return True
        return False

    def await_default(self, stream: Stream, device: torch.device) -> None:
        """Let a stream wait for a device's default stream, where a dataset works that makes tensors there."""
        with self._asking:
            if device not in self._defaults:
                self._defaults[device] = default_stream(self.device_module, device)
        self._await(stream, self._defaults[device], device)

    def _await(self, stream: Stream, other: Stream, key: object) -> None:
        # A mark for each use, kept: to destroy one may block.
        with self._asking:
            if key not in self._marks:
                self._marks[key] = self.event()
            mark = self._marks[key]
            mark.record(other)
            stream.wait_event(mark)

    def drain(self) -> None:
        """Wait until everything on the three streams is done. Never while the rank is awaited at the gate.

        By events: a host that waits for one sleeps, where one that waits for a stream may spin, and torch
        does not take it for a mistake of the user's (`set_sync_debug_mode`).
        """
        for stream in (self.copy, self.compute, self.comm):
            mark = self.event()
            mark.record(stream)
            mark.synchronize()


class StreamLane(Lane):
    """A rank on an accelerator.

    Args:
        device: With its index.
        module: Replacement of its device module, in tests.
    """

    is_async = True

    def __init__(self, device: torch.device, module: Any = None) -> None:
        super().__init__(device, module or device_module(device))

    @cached_property
    def capturing(self) -> Stream:
        """The stream on which graphs of this rank are captured; nothing else knows it, or waits for it."""
        stream: Stream = self.device_module.Stream(device=self.device)
        return stream


class HostLane(Lane):
    """A rank on the CPU: the calling thread does the work itself, at once."""

    is_async = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, _HOST)

    @property
    def kind(self) -> str:
        """See `Lane.kind`. Each process has one of its own: the bits may depend on the number of threads."""
        return f"CPU of {platform.node()}, process {os.getpid()}"


def open_lanes(devices: Sequence[torch.device]) -> list[Lane]:
    """One lane per rank. Ranks that share a device have streams of their own.

    Streams are made once per process and used again by later runs: torch hands out 32 of each priority
    and then the first ones again, so a process that made new ones for each run would end up with two roles
    on one stream.
    """
    seen: Counter[torch.device] = Counter()
    lanes: list[Lane] = []
    for device in devices:
        if not is_accelerator(device):
            lanes.append(HostLane(device))
            continue
        key = device, seen[device]
        seen[device] += 1
        with _making:
            if key not in _made:
                _made[key] = StreamLane(device)
            lanes.append(_made[key])
    return lanes


class _NoStream:
    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _HostEvent:
    """Work is done when the call returns, so a mark is a time."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self, _stream: Any = None) -> None:  # there is one
        self._at_s = perf_counter()

    def wait(self, stream: Any = None) -> None:
        # A CUDA stream asks so where it is to wait for an event.
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return (end_event._at_s - self._at_s) * 1e3


_NO_STREAM = _NoStream()

_HOST = SimpleNamespace(
    Stream=lambda **_: _NO_STREAM,
    Event=lambda **_: _HostEvent(),
    stream=lambda _: nullcontext(),
    device=lambda _: nullcontext(),
    current_stream=lambda _: _NO_STREAM,
    default_stream=lambda _: _NO_STREAM,
)
"""Stands for the module that drives a device: there is one stream, and nothing behind it."""

_made: dict[tuple[torch.device, int], Lane] = {}
_making = threading.Lock()
