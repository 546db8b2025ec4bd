"""Process groups whose ranks are threads of this process.

A rank puts its tensor down and goes on. When the last one has come, a call is cut into parts. On the CPU
whoever waits for the call does parts of it: a rank that is early works for one that is late, and ranks that
are equally fast share. On CUDA the last arrival enqueues all parts, on the comm stream of one rank per card,
between two marks: what the ranks had enqueued before, and the end, which their streams wait for.

Not NCCL, also on distinct cards: its kernels spin until their peers run, and between the first and the last
launch of a call no thread of the process may allocate on a device; ranks that are in the middle of a backward
pass do. Processes have no such hazard: `ProcessGroup.from_torch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any, NoReturn

from torch import Tensor

from flowdp.collective.base import BLOCK, CUDA_BLOCK
from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.collective.reduction import Op, reduce_all
from flowdp.device.discovery import DevicesOption, resolve_devices
from flowdp.device.streams import QUIET, Event, Lane, open_lanes
from flowdp.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, OptionError
from flowdp.policy.formats import format_error

__all__ = ["group_lanes", "local_groups"]

TIMEOUT_S = 600.0

Job = Callable[[], object]
Plan = Callable[[Sequence[Any]], Sequence[Job]]
"""From what each rank gave, in order, to the parts of the work, which may be done in any order at once."""


def local_groups(devices: DevicesOption = "auto", *, timeout: float = TIMEOUT_S) -> list[ProcessGroup]:
    """Process groups for threads of this process, one per device; each is used by one thread of yours.

    ::

        def work(group):
            model = flowdp.DistributedDataParallel(make().to(group.device), group)
            ...

        groups = flowdp.local_groups(["cpu", "cpu"])
        threads = [threading.Thread(target=work, args=(group,)) for group in groups]

    Args:
        devices: As the `Trainer` takes them: "auto", a number, or a list with one per rank, in which a device
            may repeat. All of them the CPU, or all CUDA devices.
        timeout: Seconds that a rank waits for the others to make the same call.

    Raises:
        OptionError: No such device, CPU and CUDA mixed, or a timeout that is not positive or not finite.
    """
    places = resolve_devices(devices)
    if len({place.type for place in places}) > 1:
        raise OptionError(
            f"the ranks of a group must all be on the CPU or all on CUDA devices, not on "
            f"{', '.join(map(str, places))}"
        )
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise OptionError(f"timeout must be a positive, finite number of seconds, not {timeout!r}")
    return group_lanes(open_lanes(places), timeout)


def group_lanes(lanes: Sequence[Lane], timeout: float = TIMEOUT_S) -> list[ProcessGroup]:
    """Process groups on these lanes: one per rank, all with streams or all without."""
    table = _Table(lanes, timeout)
    return [_LocalGroup(table, rank) for rank in range(len(lanes))]


class _Call:
    """One collective: what the ranks gave for it, and what is left to do."""

    def __init__(self, number: int, what: str, rank: int) -> None:
        self.number = number
        self.what = what
        self.first = rank
        self.given: dict[int, Any] = {}
        self.ready: list[Event] = []
        self.done: list[Event] = []
        self.jobs: list[Job] = []  # not taken yet
        self.left = -1  # not ended yet; -1 before all have come


class _Table:
    """Where the ranks put down what they give. Its condition guards everything in it."""

    def __init__(self, lanes: Sequence[Lane], timeout: float) -> None:
        self.lanes = tuple(lanes)
        self.size = len(lanes)
        # The first rank on each card.
        self.workers = list({lane.device: rank for rank, lane in reversed(list(enumerate(lanes)))}.values())
        self._timeout = timeout
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._counts = [0] * self.size
        self._gone: dict[int, str] = {}
        self._error: tuple[type[CollectiveError], str] | None = None
        self._twins: list[_Table] = []

    def twin(self) -> _Table:
        """Another table for the same ranks, which ends with this one."""
        made = _Table(self.lanes, self._timeout)
        with self._changed:
            self._twins.append(made)
        return made

    def put(self, rank: int, what: str, given: Any, plan: Plan) -> _Call:
        """Put down what a rank gives for its next call; does not wait.

        Raises:
            CollectiveError: The group has failed, or this call is another one than the others'.
        """
        ready = self._mark_ready(rank)
        with self._changed:
            number = self._counts[rank]
            self._counts[rank] += 1
            call = self._calls.setdefault(number, _Call(number, what, rank))
            if call.what != what:
                self._fail(
                    CollectiveError,
                    f"the ranks' calls differ: call {number} is {call.what} on rank {call.first} and {what} "
                    f"on rank {rank}",
                )
            self._raise_error()
            call.given[rank] = given
            call.ready += ready
            if len(call.given) < self.size:
                return call
            del self._calls[number]
            try:
                jobs = list(plan([call.given[rank] for rank in range(self.size)]))
            except CollectiveError as error:
                self._fail(type(error), str(error))
            if not ready:
                self._open(call, jobs)
        if ready:
            try:
                self._enqueue(call, jobs)
            except BaseException as error:
                self.fail(CollectiveAborted, f"{what} failed: {format_error(error)}")
                raise
            with self._changed:
                self._open(call, [])
        return call

    def wait(self, rank: int, call: _Call) -> None:
        """Wait for the ranks that have not come, and do a part of the work.

        Raises:
            CollectiveError: The group has failed.
        """
        end_s = monotonic() + self._timeout
        with self._changed:
            while call.left < 0:
                self._check(call)
                if not self._changed.wait(end_s - monotonic()) and call.left < 0:
                    late = sorted(set(range(self.size)) - set(call.given))
                    self._fail(
                        CollectiveTimeout,
                        f"{_ranks(late)} did not come to {call.what} (call {call.number}) within "
                        f"{self._timeout:g} s",
                    )
            while call.jobs:
                job = call.jobs.pop()
                self._changed.release()
                try:
                    job()
                except BaseException as error:
                    self.fail(CollectiveAborted, f"{call.what} failed: {format_error(error)}")
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
        """Let every call that is not complete, and all later ones, raise this; the first reason stays."""
        with self._changed:
            self._error = self._error or (kind, reason)
            self._changed.notify_all()
            twins = list(self._twins)
        for twin in twins:
            twin.fail(kind, reason)

    def leave(self, rank: int) -> None:
        """A rank comes no more: calls that it has not made can never be complete."""
        with self._changed:
            self._gone[rank] = f"rank {rank} has closed its group"
            self._changed.notify_all()
            twins = list(self._twins)
        for twin in twins:
            twin.leave(rank)

    def _open(self, call: _Call, jobs: list[Job]) -> None:
        call.jobs, call.left = jobs[::-1], len(jobs)  # taken from the end
        self._changed.notify_all()

    def _check(self, call: _Call) -> None:
        self._raise_error()
        for rank, reason in self._gone.items():
            if rank not in call.given:
                self._fail(CollectiveAborted, f"{reason} and does not come to {call.what}")

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

    def _enqueue(self, call: _Call, jobs: Sequence[Job]) -> None:
        with QUIET, ExitStack() as stack:
            for worker in self.workers:  # rank 0 comes last: the work is done on its card
                lane = self.lanes[worker]
                for mark in call.ready:
                    lane.comm.wait_event(mark)
                stack.enter_context(lane.on(lane.comm))
            for job in jobs:
                job()
            for worker in self.workers:
                lane = self.lanes[worker]
                mark = lane.event()
                mark.record(lane.comm)
                call.done.append(mark)


class _LocalGroup(ProcessGroup):
    backend = "local"

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank, self.size = rank, table.size
        lane = table.lanes[rank]
        self.device = lane.device
        self.shares_device = lane.is_async and len(table.workers) < table.size

    def all_gather_object(self, thing: Any) -> list[Any]:
        call = self._call("all_gather_object", thing, _nothing)
        return [call.given[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        self._call("barrier", None, _nothing)

    def twin(self) -> ProcessGroup:
        made = self._table.twin() if self.rank == 0 else None
        return _LocalGroup(self.all_gather_object(made)[0], self.rank)

    def abort(self, reason: str) -> None:
        self._table.fail(CollectiveAborted, f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        self._table.leave(self.rank)

    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:
        return self._start_call(call, flat, partial(_reductions, op))

    def _broadcast(self, flat: Tensor, src: int, call: str) -> Work:
        return self._start_call(call, flat, partial(_copies, src))

    def _gather(self, flat: Tensor, outputs: list[Tensor], call: str) -> None:
        self._check_device(flat)
        self._call(call, (flat, outputs), _gathers)

    def _call(self, what: str, given: Any, plan: Plan) -> _Call:
        call = self._table.put(self.rank, what, given, plan)
        self._table.wait(self.rank, call)
        return call

    def _start_call(self, what: str, flat: Tensor, plan: Plan) -> Work:
        self._check_device(flat)
        return Work(partial(self._table.wait, self.rank, self._table.put(self.rank, what, flat, plan)))

    def _check_device(self, flat: Tensor) -> None:
        here = self.device
        if flat.device.type != here.type or (here.type == "cuda" and flat.device != here):
            raise OptionError(f"rank {self.rank} of the group is on {here}, the tensor on {flat.device}")


def _spans(flat: Tensor) -> list[slice]:
    """Parts: eight blocks each on the CPU, where taking one costs more than a block; one block on CUDA."""
    size = CUDA_BLOCK if flat.is_cuda else 8 * BLOCK
    return [slice(start, start + size) for start in range(0, flat.numel(), size)]


def _nothing(given: Sequence[Any]) -> list[Job]:  # noqa: ARG001 - to come is all there is to do
    return []


def _reductions(op: Op, flats: Sequence[Tensor]) -> list[Job]:
    owners: dict[int, int] = {}
    for rank, flat in enumerate(flats):
        if flat.numel() and owners.setdefault(flat.data_ptr(), rank) != rank:
            raise CollectiveError(
                f"ranks {owners[flat.data_ptr()]} and {rank} gave the same memory to all_reduce: each rank "
                "needs a model, and tensors, of its own"
            )
    return [partial(reduce_all, [flat[span] for flat in flats], op) for span in _spans(flats[0])]


def _copies(src: int, flats: Sequence[Tensor]) -> list[Job]:
    return [
        partial(flat[span].copy_, flats[src][span])
        for rank, flat in enumerate(flats)
        if rank != src
        for span in _spans(flat)
    ]


def _gathers(given: Sequence[tuple[Tensor, list[Tensor]]]) -> list[Job]:
    return [
        partial(output.copy_, flat)
        for _, outputs in given
        for (flat, _), output in zip(given, outputs, strict=True)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
