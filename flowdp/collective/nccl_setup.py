"""NCCL communicators of a group of ranks: creation, check, and one sum.

`nccl` is cupy's module of that name throughout, or its replacement in tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ldexp
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.mean import arithmetic
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError
from flowdp.policy.formats import format_error

__all__ = [
    "ABORT_S",
    "MAKING_S",
    "REMAKING_S",
    "Call",
    "CommunicatorSetup",
    "Communicators",
    "Members",
    "Side",
    "abort_all",
    "gather_calls",
    "launch_group",
    "nccl_call",
    "nccl_errors",
    "room_errors",
    "sum_call",
    "sum_replicas",
]

MAKING_S = 120.0
"""Limit on making the communicators: one or two seconds as a rule, but eight big cards have taken 55, nearly
all of it to load kernels (NVIDIA/nccl#1646)."""

REMAKING_S = 30.0
"""Limit on making them once more, when ranks have left: the kernels are loaded by then."""

SUMS_S = 10.0
"""Limit on the first sums, once the communicators are made."""

ABORT_S = 2.0
"""Limit on an abort; then its threads are left alone."""

CHECKED = 1 << 26
"""Elements of a part of a flat that the first sums have, at most. NCCL connects an algorithm when a size
first asks for it, so the first sums have the sizes of all later ones; beyond this its choice is the same."""

Call = tuple[str, tuple[int, ...]]
"""A call of a communicator: its name and arguments."""

_MAKING = threading.Lock()
"""Communicators are made by one thread of the process at a time: two that wait for their devices in turns
would wait for each other."""


def nccl_call(
    nccl: Any, lane: Lane, name: str, given: Tensor, taken: Tensor, *how: int, count: int | None = None
) -> Call:
    """A call on a rank's comm stream.

    Args:
        nccl: cupy's module.
        lane: Lane of the rank.
        name: Method of the communicator.
        given: Memory that is read.
        taken: Memory that is written to.
        how: Operation, or rank, where the method takes them.
        count: Elements; None: those of `given`.
    """
    number = getattr(nccl, "NCCL_" + str(given.dtype).removeprefix("torch.").upper())
    stream = getattr(lane.comm, "cuda_stream", 0)
    count = given.numel() if count is None else count
    return name, (given.data_ptr(), taken.data_ptr(), count, int(number), *how, int(stream))


def sum_call(
    nccl: Any, lane: Lane, memory: Tensor, part: Tensor | None = None, *, takes_max: bool = False
) -> Call:
    """The call that sums memory over all ranks in place.

    Args:
        nccl: cupy's module.
        lane: Lane of the rank.
        memory: Its memory.
        part: The part of it that this rank is to have the sum of; None, or the memory: all.
        takes_max: The maximum instead of the sum.
    """
    part = memory if part is None else part
    operation = int(nccl.NCCL_MAX if takes_max else nccl.NCCL_SUM)
    name = "allReduce" if part is memory else "reduceScatter"
    return nccl_call(nccl, lane, name, memory, part, operation, count=part.numel())


def gather_calls(nccl: Any, lane: Lane, flats: Sequence[Flat], rank: int) -> list[Call]:
    """The calls by which all ranks get each one's span of the flats that are cut."""
    return [
        nccl_call(nccl, lane, "allGather", flat.memory[flat.span(rank)], flat.memory)
        for flat in flats
        if flat.spans > 1 and flat.split
    ]


def launch_group(nccl: Any, comms: Sequence[Any], calls: Sequence[Sequence[Call]]) -> None:
    """Launch the calls of each rank here as one group."""
    nccl.groupStart()
    try:
        for comm, rank_calls in zip(comms, calls, strict=True):
            for name, arguments in rank_calls:
                getattr(comm, name)(*arguments)
    finally:
        nccl.groupEnd()


class _Carried:
    """A part of a flat on its way: its memory, or a wider copy where NCCL would round or has no such dtype.

    Attributes:
        counts: Whether it takes the maximum.
        drifts: Whether its distance from the mean counts: parameters.
        mean: What this rank has the mean of: the memory, or its span of it.
        summed: The same of `work`.
    """

    def __init__(
        self,
        memory: Tensor,
        wide: torch.dtype,
        *,
        counts: bool = False,
        drifts: bool = False,
        span: slice | None = None,
    ) -> None:
        self.memory = self.mean = memory
        self.work = self.summed = memory if memory.dtype == wide else torch.empty_like(memory, dtype=wide)
        if span is not None:
            self.mean, self.summed = memory[span], self.work[span]
        self.is_staged = self.work is not memory
        self.counts = counts
        self.drifts = drifts
        # Of the work's dtype, so that a division by it casts nothing; and the norm likewise.
        self.weight = torch.zeros((), dtype=wide, device=memory.device)
        self.norm = torch.zeros((), dtype=wide, device=memory.device)


class Side:
    """One rank's part in a sum. All that it needs is made here, so that a launch allocates nothing.

    Attributes:
        tail: The weight, the weighted square of the parameters, and, of this rank alone, the square of the
            mean. Float64, shape (3,).
        calls: The calls of a sum.
    """

    def __init__(self, nccl: Any, lane: Lane, flats: Sequence[Flat], rank: int = 0) -> None:
        self.lane = lane
        with lane.on(lane.comm):
            self._carried = [part for flat in flats for part in _parts(flat, rank) if part.memory.numel()]
            self.tail = torch.zeros(3, dtype=torch.float64, device=flats[0].memory.device)
            self._norm = torch.zeros((), dtype=torch.float64, device=self.tail.device)
        self._weight, self._square, self._mean_square = self.tail.unbind()
        self.calls = [
            sum_call(nccl, lane, carried.work, carried.summed, takes_max=carried.counts)
            for carried in self._carried
        ]
        self.calls.append(sum_call(nccl, lane, self.tail[:2]))

    def scale(self, weight: float, *, drift: bool, equal: bool = False, bad: Tensor | None = None) -> None:
        """Multiply by the weight, before the sum.

        A weight of 0 leaves the replica out: 0 times NaN would be NaN. With `equal` all weights that are not
        0 are this one, and it is left out of the parameters' sum. A replica that is `bad` weighs nothing all
        the same, and holds zeros.
        """
        self.tail.zero_()
        self._weight.fill_(weight)
        if bad is not None:
            self._weight.masked_fill_(bad, 0.0)
        for carried in self._carried:
            if weight == 0.0 and not carried.counts:
                carried.work.zero_()
                continue
            if carried.is_staged:
                carried.work.copy_(carried.memory)
            if carried.counts:
                continue
            self._add_square(carried, self._square, weight, drift)
            # A buffer may be as large as its dtype allows, which no sum may be.
            if not (equal and carried.drifts):
                carried.work.mul_(weight)

    def divide(self, weight: float, *, drift: bool, equal: bool = False) -> None:
        """Divide by the sum of the weights, after the sum; `weight` is any rank's where all are equal."""
        for carried in self._carried:
            if not carried.counts:
                carried.weight.copy_(self._weight)
                if equal and carried.drifts:
                    carried.weight.div_(weight)  # how many there are
                if carried.is_staged and not (drift and carried.drifts):
                    torch.div(carried.summed, carried.weight, out=carried.mean)
                    continue
                carried.summed.div_(carried.weight)
                self._add_square(carried, self._mean_square, 1.0, drift)
            if carried.is_staged:
                carried.mean.copy_(carried.summed)

    def fill(self, value: float, count: int) -> None:
        """Give floats one value and integers another."""
        with self.lane.on(self.lane.comm):
            for carried in self._carried:
                carried.memory.fill_(count if carried.counts else value)

    def distance(self, value: float, count: int) -> float:
        """Distance of this memory from given values; NaN shows. Overwrites it.

        Threads: any; it waits for the device.
        """
        with self.lane.on(self.lane.comm):
            away = [
                carried.memory.sub_(count if carried.counts else value).abs_().max()
                for carried in self._carried
            ]
            return sum(map(float, away))

    def _add_square(self, carried: _Carried, to: Tensor, weight: float, drift: bool) -> None:
        if drift and carried.drifts:
            torch.linalg.vector_norm(carried.work, out=carried.norm)
            self._norm.copy_(carried.norm)
            to.addcmul_(self._norm, self._norm, value=weight)


def _parts(flat: Flat, rank: int) -> Iterator[_Carried]:
    """Parameters; buffers in float64, from which a constant comes out as it went in; integers and flags."""
    memory = flat.memory
    if flat.counts:
        memory = memory.view(torch.uint8) if memory.dtype == torch.bool else memory
        yield _Carried(memory, torch.int32 if memory.dtype == torch.int16 else memory.dtype, counts=True)
    else:
        span = flat.span(rank) if flat.spans > 1 else None
        yield _Carried(memory[: flat.split], arithmetic(memory.dtype), drifts=flat.is_measured, span=span)
        yield _Carried(memory[flat.split :], torch.float64)


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of this process among those of its communicators, of which other processes may have more.

    Attributes:
        name: NCCL's name of the group, which all of its processes were told; None: it has none yet.
        ranks: Ranks of this process.
        size: Ranks of all.
    """

    name: Any
    ranks: range
    size: int


def sum_replicas(
    launch: Callable[[Sequence[Sequence[Call]]], None],
    sides: Sequence[Side],
    samples: Sequence[float],
    *,
    drift: bool,
    bad: Sequence[Tensor | None] = (),
    first: int = 0,
) -> None:
    """Enqueue one mean over all ranks. When NCCL refuses, memory that is summed in place is scaled already.

    Equal samples need one pass over the parameters, behind the sum; others one more before it.

    Args:
        launch: Launches the calls of the ranks of this process.
        sides: Their sides.
        samples: Weights of all ranks of the communicators.
        drift: Whether the distance from the mean is measured.
        bad: Verdicts on the replicas of this process; empty: there are none.
        first: The first rank of this process.
    """
    # Divided by a power of two: weights that are numbers of samples, and so their sum, stay exact.
    bits = int(sum(samples)).bit_length()
    equal = len(set(samples).difference({0})) == 1
    for index, (side, count) in enumerate(zip(sides, samples[first : first + len(sides)], strict=True)):
        with side.lane.on(side.lane.comm):
            side.scale(ldexp(count, -bits), drift=drift, equal=equal, bad=bad[index] if bad else None)
    launch([side.calls for side in sides])
    for side in sides:
        with side.lane.on(side.lane.comm):
            side.divide(ldexp(max(samples), -bits), drift=drift, equal=equal)


class CommunicatorSetup:
    """Creation of communicators on a thread of its own: a call that hangs in NCCL cannot be cancelled.

    `QUIET` is held only for allocations before the first sum: a thread that hangs would never give it
    back. Allocations of another run meanwhile can at worst make this one late. Where threads of this run
    allocate, too, the waiting thread holds it all the time.

    The thread that takes the communicators hands them out or aborts them, so that each is aborted once. While
    the thread may be inside NCCL, no other aborts them: NCCL would free memory that the thread uses.

    The replicas' flats are not changed. `quiet` is `QUIET`, or nothing where the caller of `wait` holds it.
    Without `members` the ranks of the lanes are all.
    """

    def __init__(
        self,
        nccl: Any,
        lanes: Sequence[Lane],
        flats: Sequence[Sequence[Flat]],
        quiet: AbstractContextManager[Any] = QUIET,
        members: Members | None = None,
    ) -> None:
        self._nccl = nccl
        self._members = members or Members(None, range(len(lanes)), len(lanes))
        self._quiet = quiet
        self._lanes = lanes
        self._flats = flats
        self._errors: list[BaseException] = []
        self._is_made = threading.Event()
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # guards the three below, and the order of end and timeout
        self._comms: list[Any] = []
        self._is_given_up = False
        self._is_outside = False  # of NCCL: the thread waits for the device

    def wait(self, making_s: float = MAKING_S, sums_s: float = SUMS_S) -> list[Any]:
        """The communicators, one per rank, whose sums were right.

        Raises:
            CollectiveError: They could not be made, or are late or wrong. None is left, or one that hangs
                inside NCCL aborts them itself when it comes back.
        """
        for lane in self._lanes:
            lane.drain()
        if not _MAKING.acquire(timeout=making_s):
            raise CollectiveError("another run of this process still hangs in NCCL's start")
        threading.Thread(target=self._run, name="flowdp-nccl", daemon=True).start()
        try:
            is_made = self._is_made.wait(making_s)
            is_over = is_made and self._is_over.wait(sums_s)
        except BaseException:  # Ctrl-C
            abort_all(self._leave())
            raise
        comms = self._leave()
        if is_over and not self._errors:
            return comms
        abort_all(comms)
        if is_over:
            # Taken out: a kept error keeps its frames, and they the memory of the sums.
            raise self._errors.pop()
        if is_made:
            raise CollectiveError(
                f"NCCL's first sums on {self._where()} were not there within {sums_s:g} s. If the boards "
                "cannot reach each other's memory, NCCL_P2P_DISABLE=1 helps; NCCL_DEBUG=INFO says more"
            )
        raise CollectiveError(
            f"NCCL did not make its communicators for {self._where()} within {making_s:g} s; NCCL_DEBUG=INFO "
            "says what it is doing"
        )

    def _leave(self) -> list[Any]:
        """Stop waiting; returns the communicators that may be used or aborted now."""
        with self._lock:
            self._is_given_up = not self._is_over.is_set()
            return self._take() if self._is_outside or not self._is_given_up else []

    def _take(self) -> list[Any]:
        comms, self._comms = self._comms, []
        return comms

    def _run(self) -> None:
        try:
            with nccl_errors(self._nccl, f"make communicators for {self._where()}"):
                self._make()
            self._is_made.set()
            self._check()
        except BaseException as error:
            self._errors.append(error)
        with self._lock:
            self._is_over.set()
            comms = self._take() if self._is_given_up else []
        self._is_made.set()
        abort_all(comms)
        _MAKING.release()

    def _make(self) -> None:
        """Make all communicators in one group: each alone would wait for the others.

        `initAll` does the same, but holds the interpreter lock meanwhile.
        """
        members = self._members
        name = members.name or self._nccl.get_unique_id()
        self._nccl.groupStart()
        try:
            for rank, lane in zip(members.ranks, self._lanes, strict=True):
                with lane.on(lane.comm):  # NCCL takes the current device
                    self._comms.append(self._nccl.NcclCommunicator(members.size, name, rank))
        finally:
            self._nccl.groupEnd()

    def _check(self) -> None:
        """Take two means of known values; first-use allocations are made here."""
        self._go(outside=False)
        ranks, size = self._members.ranks, self._members.size
        with self._quiet:
            flats = [
                [_stand_in(lane, flat) for flat in rank_flats]
                for lane, rank_flats in zip(self._lanes, self._flats, strict=True)
            ]
            places = list(zip(self._lanes, flats, ranks, strict=True))
            sides = [Side(self._nccl, *place) for place in places]
        gathers = [gather_calls(self._nccl, *place) for place in places]
        wrong: list[str] = []  # told behind both sums: another machine waits for this one in the second
        for samples in (range(1, size + 1), range(size)):
            if not any(samples):
                continue
            self._go(outside=False)
            for rank, side in zip(ranks, sides, strict=True):
                side.fill(rank + 1, rank % 2)
            with nccl_errors(self._nccl, f"take its first sums on {self._where()}"):
                launch = partial(launch_group, self._nccl, self._comms)
                sum_replicas(launch, sides, samples, drift=True, first=ranks.start)
                if any(gathers):
                    launch(gathers)
            self._go(outside=True)
            mean = sum(count * (rank + 1) for rank, count in enumerate(samples)) / sum(samples)
            for rank, side in zip(ranks, sides, strict=True):
                if not (away := side.distance(mean, min(size - 1, 1))) < 1e-2 * mean:
                    wrong.append(f"rank {rank} wrong sums, {away:g} away from {mean:g}")
        if wrong:
            raise CollectiveError(
                f"NCCL on {self._where()} gives {wrong[0]}: the boards do not reach each other's memory as "
                "they claim; try NCCL_P2P_DISABLE=1"
            )

    def _go(self, *, outside: bool) -> None:
        """Continue, in NCCL or outside of it, if the caller still waits."""
        with self._lock:
            if self._is_given_up:
                raise CollectiveError("NCCL was given up")
            self._is_outside = outside

    def _where(self) -> str:
        devices = ", ".join(str(lane.device) for lane in self._lanes)
        others = self._members.size - len(self._lanes)
        return f"{devices} and {others} of other machines" if others else devices


def _stand_in(lane: Lane, flat: Flat) -> Flat:
    """A flat that may be written over, in memory of `compute`, which training uses again afterwards."""
    split = min(flat.split, CHECKED // flat.spans * flat.spans)
    length = split + min(flat.memory.numel() - flat.split, CHECKED)
    with lane.on(lane.compute):
        memory = torch.empty(length, dtype=flat.memory.dtype, device=flat.memory.device)
    return Flat(memory, split, spans=flat.spans)


def abort_all(comms: Sequence[Any]) -> None:
    """Abort all, each on a thread of its own: one that is aborted waits for those that are not yet."""
    threads = [threading.Thread(target=comm.abort, name="flowdp-nccl-abort", daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    end_s = monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, end_s - monotonic()))


class Communicators:
    """Communicators of ranks of this process, for as long as nothing fails.

    Args:
        nccl: cupy's module.
        lanes: Lanes of the ranks.
        make: Makes the communicators.

    Threads:
        `launch`, `renew`: one at a time. Others: any.
    """

    def __init__(self, nccl: Any, lanes: Sequence[Lane], make: Callable[[], list[Any]]) -> None:
        self._nccl, self._lanes = nccl, tuple(lanes)
        self._lock = threading.Lock()  # guards the two below, which an abort and a close change
        self._comms = make()
        self._error: CollectiveError | None = None

    def launch(self, calls: Sequence[Sequence[Call]]) -> None:
        """Launch the calls of each rank here as one group.

        Raises:
            CollectiveError: They have been aborted or closed.
        """
        with self._lock:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            comms = list(self._comms)
        launch_group(self._nccl, comms, calls)

    def renew(self, make: Callable[[], list[Any]]) -> None:
        """Abort all and make others, with `QUIET` held; nothing is made where they have been given up.

        They are not destroyed: an abort does not wait, whatever the device of a rank that left is doing. All
        of them are, for they share memory.
        """
        abort_all(self._take())
        comms = make() if self._error is None else []
        with self._lock:
            if self._error is None:
                self._comms, comms = comms, []
        abort_all(comms)  # of a run that has failed meanwhile

    def abort(self, error: CollectiveError | None = None) -> None:
        """Abort all while no thread of the process is inside a call on one, as NCCL wants it.

        A call that hangs is no reason to wait for ever. Later launches raise the error.
        """
        comms = self._take(error or CollectiveError("NCCL was aborted or closed"))
        is_quiet = QUIET.acquire(timeout=ABORT_S / 2) if comms else False
        try:
            abort_all(comms)
        finally:
            if is_quiet:
                QUIET.release()

    def close(self) -> None:
        """Give them back behind the work of the devices; a second time does nothing."""
        comms = self._take(CollectiveError("NCCL was aborted or closed"))
        # The garbage collector may call this from a thread that holds QUIET, and then must not wait.
        if QUIET.acquire(timeout=ABORT_S / 2):
            try:
                self._destroy(comms)
            finally:
                QUIET.release()
        else:
            threading.Thread(target=self._destroy_later, args=(comms,), name="flowdp-nccl-close").start()

    def _destroy_later(self, comms: list[Any]) -> None:
        with QUIET:
            self._destroy(comms)

    def _destroy(self, comms: list[Any]) -> None:
        try:
            with ExitStack() as draining:  # of every lane, also where the device of one is dead
                for lane in self._lanes:
                    draining.callback(lane.drain)
            while comms:
                comms.pop(0).destroy()  # the last one frees the memory of all
        except BaseException:
            abort_all(comms)  # else the garbage collector destroys them, at any time
            raise

    def _take(self, error: CollectiveError | None = None) -> list[Any]:
        with self._lock:
            self._error = self._error or error
            comms, self._comms = self._comms, []
        return comms


@contextmanager
def room_errors() -> Iterator[None]:
    """Turn a lack of memory into a `CollectiveError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CollectiveError(
            f"no room for NCCL beside the replicas; backend='local' does without: {error}"
        ) from error


@contextmanager
def nccl_errors(nccl: Any, what: str) -> Iterator[None]:
    """Turn cupy's errors into a `CollectiveError` that names the failed NCCL operation."""
    try:
        yield
    except (nccl.NcclError, KeyError) as error:  # cupy has no name for the newer errors: a KeyError
        # Without its frames: in Python 3.13 they are part of a cycle, and would keep memory of the device.
        raise CollectiveError(f"NCCL could not {what}: {format_error(error)}") from error.with_traceback(None)
