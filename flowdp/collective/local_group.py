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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NoReturn

from torch import Tensor

from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.collective.reduction import Op, reduce_all, split_equally
from flowdp.device.accelerator import is_accelerator
from flowdp.device.discovery import DevicesOption, resolve_devices
from flowdp.device.streams import QUIET, Event, Lane, open_lanes
from flowdp.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, OptionError
from flowdp.policy.formats import format_error

__all__ = ["group_lanes", "local_groups"]

TIMEOUT_S = 600.0

Chunk = Callable[[], object]
"""One part of the arithmetic or the copies of a call."""

Plan = Callable[[Sequence[Any]], Sequence[Chunk]]
"""Splits a call into chunks, given the values of all ranks in order. Chunks may run at the same time."""


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
        first: The rank that made the call first.
        inputs: The value of each rank that has made the call.
        ready: Events of the ranks' streams, which the first chunk waits for.
        done: Events behind the last chunk, which the ranks' streams wait for.
        chunks: Chunks that no rank has taken yet.
        left: Number of chunks that have not ended; -1 until all ranks have made the call.
    """

    number: int
    name: str
    first: int
    inputs: dict[int, Any] = field(default_factory=dict)
    ready: list[Event] = field(default_factory=list)
    done: list[Event] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    left: int = -1


class _Rendezvous:
    """The calls of a group that some ranks have made and others have not. A condition guards all of it.

    Attributes:
        lanes: One per rank.
        size: Number of ranks.
        leaders: The first rank on each device, whose comm stream does the work of all ranks there.
    """

    def __init__(self, lanes: Sequence[Lane], timeout: float) -> None:
        self.lanes = tuple(lanes)
        self.size = len(lanes)
        self.leaders = list({lane.device: rank for rank, lane in reversed(list(enumerate(lanes)))}.values())
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._counts = [0] * self.size
        self._gone: dict[int, str] = {}
        self._error: tuple[type[CollectiveError], str] | None = None
        self._twins: list[_Rendezvous] = []

    def twin(self) -> _Rendezvous:
        """A second rendezvous of the same ranks, which fails and ends with this one."""
        made = _Rendezvous(self.lanes, self._timeout)
        with self._changed:
            self._twins.append(made)
        return made

    def put(self, rank: int, name: str, value: Any, plan: Plan) -> _Call:
        """Register the value of a rank for its next call, without waiting.

        Raises:
            CollectiveError: The group has failed, or the call differs from that of another rank.
        """
        ready = self._mark_ready(rank)
        with self._changed:
            number = self._counts[rank]
            self._counts[rank] += 1
            call = self._calls.setdefault(number, _Call(number, name, rank))
            if call.name != name:
                self._fail(
                    CollectiveError,
                    f"the ranks' calls differ: call {number} is {call.name} on rank {call.first} and {name} "
                    f"on rank {rank}",
                )
            self._raise_error()
            call.inputs[rank] = value
            call.ready += ready
            if len(call.inputs) < self.size:
                return call
            del self._calls[number]
            try:
                chunks = list(plan([call.inputs[rank] for rank in range(self.size)]))
            except CollectiveError as error:
                self._fail(type(error), str(error))
            if not ready:
                self._open(call, chunks)
        if ready:
            try:
                self._enqueue(call, chunks)
            except BaseException as error:
                self.fail(CollectiveAborted, f"{name} failed: {format_error(error)}")
                raise
            with self._changed:
                self._open(call, [])
        return call

    def wait(self, rank: int, call: _Call) -> None:
        """Wait for the other ranks to make the call, and execute chunks until it is complete.

        Raises:
            CollectiveError: The group has failed.
        """
        end_s = monotonic() + self._timeout
        with self._changed:
            while call.left < 0:
                self._check(call)
                if not self._changed.wait(end_s - monotonic()) and call.left < 0:
                    late = sorted(set(range(self.size)) - set(call.inputs))
                    self._fail(
                        CollectiveTimeout,
                        f"{_ranks(late)} did not call {call.name} (call {call.number}) within "
                        f"{self._timeout:g} s",
                    )
            while call.chunks:
                chunk = call.chunks.pop()
                self._changed.release()
                try:
                    chunk()
                except BaseException as error:
                    self.fail(CollectiveAborted, f"{call.name} failed: {format_error(error)}")
                    raise
                finally:
                    self._changed.acquire()
                call.left -= 1
                if not call.left:
                    self._changed.notify_all()
            while call.left:
                self._raise_error()
                self._changed.wait()
        stream = self.lanes[rank].current()
        for mark in call.done:
            stream.wait_event(mark)

    def fail(self, kind: type[CollectiveError], reason: str) -> None:
        """Make every incomplete call and all later ones raise this error; only the first failure counts."""
        with self._changed:
            self._error = self._error or (kind, reason)
            self._changed.notify_all()
            twins = list(self._twins)
        for twin in twins:
            twin.fail(kind, reason)

    def leave(self, rank: int) -> None:
        """Record that a rank makes no more calls: those that it has not made fail on the other ranks."""
        with self._changed:
            self._gone[rank] = f"rank {rank} has closed its group"
            self._changed.notify_all()
            twins = list(self._twins)
        for twin in twins:
            twin.leave(rank)

    def _open(self, call: _Call, chunks: list[Chunk]) -> None:
        call.chunks, call.left = chunks[::-1], len(chunks)  # popped from the end
        self._changed.notify_all()

    def _check(self, call: _Call) -> None:
        self._raise_error()
        for rank, reason in self._gone.items():
            if rank not in call.inputs:
                self._fail(CollectiveAborted, f"{reason} and does not call {call.name}")

    def _fail(self, kind: type[CollectiveError], reason: str) -> NoReturn:
        self.fail(kind, reason)  # the condition's lock is reentrant
        self._raise_error()
        raise AssertionError("an error was set")

    def _raise_error(self) -> None:
        if self._error is not None:
            kind, reason = self._error
            raise kind(reason)

    # ------------------------------------------------------------ streams
    def _mark_ready(self, rank: int) -> list[Event]:
        lane = self.lanes[rank]
        if not lane.is_async:
            return []
        mark = lane.event()
        mark.record(lane.current())
        return [mark]

    def _enqueue(self, call: _Call, chunks: Sequence[Chunk]) -> None:
        with QUIET, ExitStack() as stack:
            for leader in self.leaders:  # rank 0 is last, so the chunks run on its device and stream
                lane = self.lanes[leader]
                for mark in call.ready:
                    lane.comm.wait_event(mark)
                stack.enter_context(lane.on(lane.comm))
            for chunk in chunks:
                chunk()
            for leader in self.leaders:
                lane = self.lanes[leader]
                mark = lane.event()
                mark.record(lane.comm)
                call.done.append(mark)


class _LocalGroup(ProcessGroup):
    backend = "local"

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self.rank, self.size = rank, rendezvous.size
        lane = rendezvous.lanes[rank]
        self.device = lane.device
        self.shares_device = lane.is_async and len(rendezvous.leaders) < rendezvous.size

    def all_gather_object(self, thing: Any) -> list[Any]:
        call = self._call("all_gather_object", thing, _nothing)
        return [call.inputs[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        self._call("barrier", None, _nothing)

    def twin(self) -> ProcessGroup:
        made = self._rendezvous.twin() if self.rank == 0 else None
        return _LocalGroup(self.all_gather_object(made)[0], self.rank)

    def abort(self, reason: str) -> None:
        self._rendezvous.fail(CollectiveAborted, f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        self._rendezvous.leave(self.rank)

    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:
        return self._start_call(call, flat, partial(_reductions, op))

    def _broadcast(self, flat: Tensor, src: int, call: str) -> Work:
        return self._start_call(call, flat, partial(_copies, src))

    def _gather(self, flat: Tensor, outputs: list[Tensor], call: str) -> None:
        self._check_device(flat)
        self._call(call, (flat, outputs), _gathers)

    def _call(self, name: str, value: Any, plan: Plan) -> _Call:
        call = self._rendezvous.put(self.rank, name, value, plan)
        self._rendezvous.wait(self.rank, call)
        return call

    def _start_call(self, name: str, flat: Tensor, plan: Plan) -> Work:
        self._check_device(flat)
        call = self._rendezvous.put(self.rank, name, flat, plan)
        return Work(partial(self._rendezvous.wait, self.rank, call))

    def _check_device(self, flat: Tensor) -> None:
        here = self.device
        if flat.device.type != here.type or (is_accelerator(here) and flat.device != here):
            raise OptionError(
                f"rank {self.rank} of the group is on {here}, the tensor on {flat.device}: move it there"
            )


def _nothing(_given: Sequence[Any]) -> list[Chunk]:  # a barrier has no work
    return []


def _reductions(op: Op, flats: Sequence[Tensor]) -> list[Chunk]:
    owners: dict[int, int] = {}
    for rank, flat in enumerate(flats):
        if flat.numel() and owners.setdefault(flat.data_ptr(), rank) != rank:
            raise CollectiveError(
                f"ranks {owners[flat.data_ptr()]} and {rank} gave the same memory to all_reduce: each rank "
                "needs a model, and tensors, of its own"
            )
    return [partial(reduce_all, pieces, op) for pieces in split_equally(flats)]


def _copies(src: int, flats: Sequence[Tensor]) -> list[Chunk]:
    return [
        partial(target.copy_, source)
        for rank, flat in enumerate(flats)
        if rank != src
        for target, source in split_equally([flat, flats[src]])
    ]


def _gathers(given: Sequence[tuple[Tensor, list[Tensor]]]) -> list[Chunk]:
    return [
        partial(output.copy_, flat)
        for _, outputs in given
        for (flat, _), output in zip(given, outputs, strict=True)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
