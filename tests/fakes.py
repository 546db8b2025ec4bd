"""CUDA without a GPU: streams and events on CPU tensors, with a detector of missing edges.

`FakeCuda` stands for `torch.cuda` in a `StreamLane`. Every operation runs at once, on CPU tensors, but is
recorded on its thread's current stream, with the memory it reads and writes. Two accesses to watched memory,
one of them a write, must be ordered as CUDA would order them: on one stream, through a chain of recorded and
awaited events, or because the host waited for the first before it launched the second. Otherwise they are a
race, and `races` names both operations and their streams.

Streams can capture, too: see `tests/fake_graphs.py`.

Clocks are vector clocks: for each stream, the operations known to be complete when its next one runs. The
host is one sequence (inboxes, locks and the gate order its threads): a wait in one thread covers every later
launch. So a race between accesses far apart in time may be missed; one between neighbours is not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from flowdp.device import torch_modes
from flowdp.device.dispatch import RankMode
from tests.fake_graphs import Captures, FakeGraph
from tests.limits import HANG_S

Clock = dict[int, int]


def merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if into.get(stream, -1) < time:
            into[stream] = time


@dataclass
class Access:
    stream: FakeStream
    time: int
    start: int
    stop: int
    what: str


@dataclass(eq=False)
class Watched:
    name: str
    start: int
    stop: int
    keep: Tensor | None  # so that its address is not reused
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class FakeStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, cuda: FakeCuda, device: Any, priority: int) -> None:
        self.cuda = cuda
        self.device = device
        self.priority = priority
        self.number = next(cuda.numbers)
        self.cuda_stream = self.number
        self.name = f"stream {self.number}"
        self.time = 0
        self.clock: Clock = {}

    def wait_event(self, event: Any) -> None:
        event.wait(self)  # as in torch

    def synchronize(self) -> None:
        self.cuda.captures.unsafe(f"synchronised {self}", self)
        with self.cuda.lock:
            merge(self.cuda.host, {**self.clock, self.number: self.time})

    def query(self) -> bool:
        if self.cuda.failure is not None:
            raise self.cuda.failure
        return True

    def __repr__(self) -> str:
        return self.name


class FakeEvent:
    """Stands for `torch.cuda.Event`.

    Attributes:
        passed: Whether the device has passed it: at once, unless a test that holds it back replaces this.
    """

    passed = threading.Event()
    passed.set()

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda = cuda
        self.enable_timing = enable_timing
        self.name = f"event {next(cuda.numbers)}"
        self.clock: Clock = {}
        self.at_s: float | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        self.cuda.captures.recorded(self, stream)
        with self.cuda.lock:
            self.clock = {**stream.clock, stream.number: stream.time}
            self.at_s = perf_counter()
            self.cuda.log.append((stream.name, "records", self.name))

    def wait(self, stream: FakeStream) -> None:
        self.cuda.captures.awaited(self, stream)
        with self.cuda.lock:
            merge(stream.clock, self.clock)
            self.cuda.log.append((stream.name, "waits for", self.name))

    def synchronize(self) -> None:
        self.cuda.captures.unsafe(f"waited for {self.name}", event=self)
        assert self.passed.wait(HANG_S)
        with self.cuda.lock:
            merge(self.cuda.host, self.clock)

    def query(self) -> bool:
        self.cuda.captures.unsafe(f"asked {self.name}", event=self)
        return self.passed.is_set()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            if not event.enable_timing or event.at_s is None:
                raise RuntimeError(f"{event.name} has no time: made without timing, or never recorded")
            with self.cuda.lock:
                late = [s for s, time in event.clock.items() if self.cuda.host.get(s, -1) < time]
            if late:
                raise RuntimeError(f"{event.name} may not have been passed: it was not waited for")
        assert self.at_s is not None
        assert end_event.at_s is not None
        return (end_event.at_s - self.at_s) * 1e3


class FakeCuda:
    """Stands for `torch.cuda` in `StreamLane(device, cuda)`.

    Attributes:
        log: Records and waits of streams, in order, as (stream, verb, event).
        races: Descriptions of unordered accesses.
        failure: Raised by each stream that is asked whether it is done, once a test has set it.
        captures: Streams under capture, and calls forbidden then.
        memory: Stands for `torch.cuda.memory`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count()
        self.host: Clock = {}
        self.log: list[tuple[str, str, str]] = []
        self.races: list[str] = []
        self.watched: list[Watched] = []
        self._local = threading.local()
        self.captures = self.memory = Captures()
        self.default = FakeStream(self, None, 0)
        self.default.name = "the default stream"
        self.failure: RuntimeError | None = None
        self.name = "fake device"

    # ------------------------------------------------------------ interface of torch.cuda
    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        return FakeStream(self, device, priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing, blocking)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.name)

    def current_stream(self, device: Any = None) -> FakeStream:
        stack: list[FakeStream] = getattr(self._local, "stack", [])
        return stack[-1] if stack else self.default

    def default_stream(self, device: Any = None) -> FakeStream:
        return self.default

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append(stream)
        try:
            with _Recorder(self):
                yield
        finally:
            self._local.stack.pop()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 10**9, 10**9

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def is_current_stream_capturing(self) -> bool:
        return self.captures.of(self.current_stream()) is not None

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self.numbers)

    # ------------------------------------------------------------ the detector
    def watch(self, name: str, *tensors: Tensor) -> None:
        """Check accesses to the memory of these tensors from now on."""
        with self.lock:
            for tensor in tensors:
                start = tensor.data_ptr()
                before = tensor.storage_offset() * tensor.itemsize
                stop = start + int(tensor.untyped_storage().nbytes() - before)
                self.watched.append(Watched(name, start, stop, tensor))

    def access(self, stream: FakeStream, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record an operation on a stream. Fakes of libraries that take raw pointers call it themselves."""
        with self.lock:
            stream.time += 1
            merge(stream.clock, self.host)
            for tensor in writes:
                self._book(stream, what, tensor, is_write=True)
            for tensor in reads:
                if not any(tensor is written for written in writes):
                    self._book(stream, what, tensor, is_write=False)

    def _book(self, stream: FakeStream, what: str, tensor: Tensor, is_write: bool) -> None:
        if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        start = tensor.data_ptr()
        span = tensor.numel()
        if not tensor.is_contiguous():
            span = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = start + span * tensor.itemsize
        for watched in self.watched:
            if start < watched.stop and watched.start < stop:
                self.check(watched, Access(stream, stream.time, start, stop, what), is_write=is_write)

    def check(self, watched: Watched, access: Access, *, is_write: bool) -> None:
        """Check an access to watched memory, under the lock."""
        for other in watched.writes + (watched.reads if is_write else []):
            if access.start < other.stop and other.start < access.stop and not self._ordered(other, access):
                self.races.append(
                    f"{watched.name}: {access.what} on {access.stream} {'writes' if is_write else 'reads'} "
                    f"what {other.what} on {other.stream} touched; nothing orders them"
                )
        # Accesses before a write are ordered before all that follows the write, or were reported just now.
        covered = [watched.writes, watched.reads] if is_write else [watched.reads]
        for accesses in covered:
            accesses[:] = [
                old
                for old in accesses
                if not (access.start <= old.start and old.stop <= access.stop)
                or (not is_write and old.stream is not access.stream)
            ]
        (watched.writes if is_write else watched.reads).append(access)

    @staticmethod
    def _ordered(before: Access, after: Access) -> bool:
        return (
            before.stream is after.stream or after.stream.clock.get(before.stream.number, -1) >= before.time
        )


class _Recorder(RankMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, roles = _roles(func)
        if (capture := self._cuda.captures.of(self._cuda.current_stream())) is not None:
            return capture.take(func, args, kwargs, is_view=roles is None)
        out = func(*args, **kwargs)
        if roles is None:
            return out
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for place, argument, is_write in roles:
            value = args[place] if place < len(args) else kwargs.get(argument)
            (writes if is_write else reads).extend(_tensors(value))
        writes += _tensors(out)
        self._cuda.access(self._cuda.current_stream(), name, reads, writes)
        return out


@cache
def _roles(func: Any) -> tuple[str, list[tuple[int, str, bool]] | None]:
    """Name of an operation, and position and name of its tensors, and which are written; None for a view."""
    schema = func._schema
    if any(made.alias_info is not None and not made.alias_info.is_write for made in schema.returns):
        return str(func), None
    return str(func), [
        (place, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for place, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    ]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def hide_modes(replace: Callable[[Any, str, Any], object], *kinds: type) -> None:
    """Let flowdp not take the mode of a fake for something of the user's that watches the thread.

    Args:
        replace: Replaces an attribute of a module.
        kinds: Other modes than that of a `FakeCuda`.
    """
    own, stack = (_Recorder, *kinds), _get_current_dispatch_mode_stack
    replace(
        torch_modes,
        "_get_current_dispatch_mode_stack",
        lambda: [mode for mode in stack() if not isinstance(mode, own)],
    )
