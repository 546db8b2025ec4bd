"""The mean by NCCL as calls on the ranks' comm streams: scale, sum, divide.

`nccl` is cupy's module of that name throughout, or its replacement in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ldexp
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.mean import arithmetic
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import Lane
from flowdp.errors import CollectiveError
from flowdp.policy.formats import format_error

__all__ = [
    "Call",
    "Side",
    "gather_calls",
    "launch_group",
    "nccl_call",
    "nccl_errors",
    "sum_call",
    "sum_replicas",
]

Call = tuple[str, tuple[int, ...]]
"""A call of a communicator: its name and arguments."""


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
        mean: The memory of which this rank has the mean, or its span of it.
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


@contextmanager
def nccl_errors(nccl: Any, what: str) -> Iterator[None]:
    """Turn cupy's errors into a `CollectiveError` that names the failed NCCL operation."""
    try:
        yield
    except (nccl.NcclError, KeyError) as error:  # cupy has no name for the newer errors: a KeyError
        # Without its frames: in Python 3.13 they are part of a cycle, and would keep memory of the device.
        raise CollectiveError(f"NCCL could not {what}: {format_error(error)}") from error.with_traceback(None)
