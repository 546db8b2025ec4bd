"""Process groups whose ranks are threads of this process.

A rank registers its tensor for a call and continues. When the last rank has registered, the call is split
into chunks. On the CPU the ranks that wait for the call execute the chunks, so that an early rank works for
a late one. On CUDA the last rank enqueues all chunks on the comm stream of one rank per device. That stream
first waits for all work that the ranks have enqueued before the call, and the ranks' streams wait for the
last chunk.

NCCL is not used, not even between different devices. Its kernels spin until their peers run, so no thread
of the process may allocate on a device between the first and the last launch of a call, and ranks in a
backward pass allocate. Separate processes do not have this problem: `ProcessGroup.from_torch`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from flowdp.collective.mean import Op, reduce_all, split_equally
from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.device.discovery import DevicesOption, resolve_devices
from flowdp.device.streams import QUIET, Event, Lane, open_lanes
from flowdp.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, OptionError
from flowdp.policy.formats import format_error

__all__ = ["group_lanes", "local_groups"]

TIMEOUT_S = 600.0

Chunk = Callable[[], object]
"""One part of the arithmetic of a call."""


def local_groups(devices: DevicesOption = "auto", *, timeout: float = TIMEOUT_S) -> list[ProcessGroup]:
    """Process groups for threads of this process: one per device, each to be used by one thread.

    ::

        def work(group):
            model = flowdp.DistributedDataParallel(make().to(group.device), group)
            ...

        groups = flowdp.local_groups(["cpu", "cpu"])
        threads = [threading.Thread(target=work, args=(group,)) for group in groups]

    Args:
        devices: "auto", a number, or a list with one device per rank, in which a device may repeat. All are
            the CPU, or all are GPUs.
        timeout: Seconds to wait until all ranks have made the same call.

    Raises:
        OptionError: An unknown device, CPU and GPUs mixed, or a timeout that is not positive and finite.
    """
    places = resolve_devices(devices)
    if len({place.type for place in places}) > 1:
        raise OptionError(
            f"the ranks of a group must all be on the CPU or all on GPUs, not on "
            f"{', '.join(map(str, places))}"
        )
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise OptionError(f"timeout must be a positive, finite number of seconds, not {timeout!r}")
    return group_lanes(open_lanes(places), timeout)


def group_lanes(lanes: Sequence[Lane], timeout: float = TIMEOUT_S) -> list[ProcessGroup]:
    """Process groups on lanes, one per rank: all lanes have streams, or none has."""
    rendezvous = _Rendezvous(lanes, timeout)
    return [_LocalGroup(rendezvous, rank) for rank in range(len(lanes))]


@dataclass(slots=True, eq=False)
class _Call:
    """One collective call: the values of the ranks, and the chunks that are left.

    Attributes:
        number: Index of the call in the group.
        name: Operation, dtype and shape, which must be equal on all ranks.
        given: The value of each rank that has made the call, in the order in which they have.
        ready: Events of the ranks' streams, which the first chunk waits for.
        done: Events behind the last chunk, which the ranks' streams wait for.
        chunks: Chunks that no rank has taken yet.
        left: Number of chunks that have not ended; -1 until all ranks have made the call.
    """

    number: int
    name: str
    given: dict[int, Any] = field(default_factory=dict)
    ready: list[Event] = field(default_factory=list)
    done: list[Event] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    left: int = -1


class _Rendezvous:
    """The calls of a group that some ranks have made and others have not. A condition guards all of it.

    Attributes:
        lanes: One per rank.
        size: Number of ranks.
    """

    def __init__(self, lanes: Sequence[Lane], timeout: float) -> None:
        self.lanes = tuple(lanes)
        self.size = len(lanes)
        # Rank 0 is last, so the chunks run on its device and stream.
        leaders = {lane.device: lane for lane in reversed(lanes)}
        self._leaders = [lane for lane in leaders.values() if lane.is_async]
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[tuple[str, int], _Call] = {}
        self._counts: Counter[tuple[str, int]] = Counter()
        self._gone: set[int] = set()
        self._error: CollectiveError | None = None

    def put(self, rank: int, channel: str, name: str, value: Any, op: Op | None) -> _Call:
        """Register the value of a rank for its next call of a channel, without waiting.

        Args:
            rank: Rank index.
            channel: Calls of each channel have an order of their own.
            name: Operation, dtype and shape.
            value: Any object, or memory to be reduced.
            op: Reduction; None: there is nothing to reduce.

        Raises:
            CollectiveError: The group has failed, or the call differs from that of another rank.
        """
        lane = self.lanes[rank]
        with self._changed:
            number = self._counts[channel, rank]
            self._counts[channel, rank] += 1
            call = self._calls.setdefault((channel, number), _Call(number, name))
            if call.name != name:
                self.fail(
                    CollectiveError(
                        f"the ranks' calls differ: call {number} is {call.name} on rank "
                        f"{next(iter(call.given))} and {name} on rank {rank}"
                    )
                )
            self._check()
            call.given[rank] = value
            if lane.is_async:
                mark = lane.event()
                mark.record(lane.current())
                call.ready.append(mark)
            if len(call.given) == self.size:
                del self._calls[channel, number]
                pieces = split_equally([call.given[rank] for rank in range(self.size)]) if op else []
                chunks: list[Chunk] = [partial(reduce_all, piece, op) for piece in pieces if op]
                if self._leaders:
                    self._enqueue(call, chunks)
                    chunks = []
                call.chunks, call.left = chunks, len(chunks)
                self._changed.notify_all()
        return call

    def wait(self, rank: int, call: _Call) -> None:
        """Wait for the other ranks to make the call, and execute chunks until it is complete.

        Raises:
            CollectiveError: The group has failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: call.left >= 0 or self._is_over_for(call), self._timeout):
                late = ", ".join(str(other) for other in range(self.size) if other not in call.given)
                self.fail(
                    CollectiveTimeout(
                        f"rank {late} did not call {call.name} (call {call.number}) within "
                        f"{self._timeout:g} s"
                    )
                )
            if call.left < 0:
                self._check()
            while call.chunks:
                chunk = call.chunks.pop()
                self._changed.release()
                try:
                    self._run(call, chunk)
                finally:
                    self._changed.acquire()
                call.left -= 1
                if not call.left:
                    self._changed.notify_all()
            self._changed.wait_for(lambda: not call.left or self._error is not None)
            if call.left:
                self._check()
        stream = self.lanes[rank].current()
        for mark in call.done:
            stream.wait_event(mark)

    def fail(self, error: CollectiveError) -> None:
        """Make every incomplete call and all later ones raise this error; only the first failure counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """Record that a rank makes no more calls: those that it has not made fail on the other ranks."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _is_over_for(self, call: _Call) -> bool:
        """Whether a call cannot become complete any more."""
        for rank in self._gone.difference(call.given):
            self.fail(CollectiveAborted(f"rank {rank} has closed its group and does not call {call.name}"))
        return self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _run(self, call: _Call, work: Chunk) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(CollectiveAborted(f"{call.name} failed: {format_error(error)}"))
            raise

    def _enqueue(self, call: _Call, chunks: Sequence[Chunk]) -> None:
        """Put the chunks on the comm streams, behind all work of the ranks before the call."""
        with QUIET, ExitStack() as stack:
            for lane in self._leaders:
                for mark in call.ready:
                    lane.comm.wait_event(mark)
                stack.enter_context(lane.on(lane.comm))
            for chunk in chunks:
                self._run(call, chunk)
            for lane in self._leaders:
                mark = lane.event()
                mark.record(lane.comm)
                call.done.append(mark)


class _LocalGroup(ProcessGroup):
    backend = "local"

    def __init__(self, rendezvous: _Rendezvous, rank: int, channel: str = "") -> None:
        self._rendezvous, self._channel = rendezvous, channel
        self.rank, self.size = rank, rendezvous.size
        self.device = rendezvous.lanes[rank].device

    def all_gather_object(self, thing: Any) -> list[Any]:
        call = self._rendezvous.put(self.rank, self._channel, "all_gather_object", thing, None)
        self._rendezvous.wait(self.rank, call)
        return [call.given[rank] for rank in range(self.size)]

    def twin(self) -> ProcessGroup:
        return _LocalGroup(self._rendezvous, self.rank, "twin")

    def abort(self, reason: str) -> None:
        self._rendezvous.fail(CollectiveAborted(f"rank {self.rank} gave up: {reason}"))

    def close(self) -> None:
        self._rendezvous.leave(self.rank)

    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:
        started = self._rendezvous.put(self.rank, self._channel, call, flat, op)
        return Work(partial(self._rendezvous.wait, self.rank, started))
