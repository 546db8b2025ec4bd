"""The mean of replicas in the host's memory: those of CPU ranks where they lie, others through pinned copies.

A large model is reduced by all members together, each its own part of all replicas, between the gate and a
second meeting. A small one is reduced by the last arrival alone, while the others stand in the gate anyway:
that takes less time than the second meeting. A CUDA rank copies its replica down before the gate, and up
again behind the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import (
    NOTHING,
    Averaging,
    BlockMean,
    Judge,
    Reading,
    is_held,
    relative_drift,
    unjudged,
)
from flowdp.collective.on_streams import ROUNDS
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import Flat, FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import ProtocolError
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["SMALL", "HostMean", "MemoryMean"]

SMALL = 1 << 18
"""Elements of a replica up to which one thread reduces alone. With two replicas of 100,000 float32 that takes
32 us a round instead of 46, with 400,000 as long, with a million it is slower (2 cores)."""


class MemoryMean:
    """Averages memories of the host, by the last arrival or by all members together.

    All members get the same bits, independent of speed and of the reducing rank.

    Args:
        flats: The layout that all memories have; they themselves may lie elsewhere.
        memories: One list per rank. A rank's may be filled later, before its first round.
        meet: `meet(rank)` returns when all members of the round have called it and raises when the round
            was given up: the second meeting at the gate.
        outer: Outer step of the parameters, one for all ranks: each reduces, and moves, a part of its own.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        memories: Sequence[Sequence[Tensor]],
        meet: Callable[[int], None],
        outer: OuterMomentum | None = None,
    ) -> None:
        self._outer = outer
        self._flats = flats
        self._memories = memories
        self._meet = meet
        self.is_small = sum(flat.memory.numel() for flat in flats) <= SMALL
        # The range that each rank reduces, cut anew when the members change.
        self._parts: list[tuple[Sequence[int], BlockMean] | None] = [None] * len(memories)
        # Squares of each member's part. A row is written before the meeting and read behind it; no rank
        # writes again before all readers have entered the gate of the next round.
        self._squares: list[Tensor | None] = [None] * len(memories)
        self._launch_ms = 0.0

    def launch(self, outcome: Outcome) -> None:
        """Reduce a small model; see `Collective.launch`."""
        if self.is_small and is_held(outcome):
            start = perf_counter()
            self._squares[outcome.members[0]] = self._reduce(outcome.members[0], outcome, alone=True)
            self._launch_ms = (perf_counter() - start) * 1e3

    def average(self, rank: int, outcome: Outcome) -> Averaging:
        """Reduce this rank's part of a large model, and wait for the others'.

        Raises:
            CollectiveAborted: The round was given up meanwhile.

        Threads: worker `rank`, in a round that is held.
        """
        if self.is_small:
            sync_ms, reducers = self._launch_ms, outcome.members[:1]
        else:
            start = perf_counter()
            self._squares[rank] = self._reduce(rank, outcome, alone=False)
            sync_ms, reducers = (perf_counter() - start) * 1e3, outcome.members
            self._meet(rank)
        drift = norm = None
        if outcome.drift and outcome.samples[rank]:
            rows = [row.tolist() for reducer in reducers if (row := self._squares[reducer]) is not None]
            own = outcome.members.index(rank)
            mean_square = sum(row[-1] for row in rows)
            drift, norm = relative_drift(sum(row[own] for row in rows), mean_square), sqrt(mean_square)
        return Averaging(sync_ms, drift, norm)

    def _reduce(self, rank: int, outcome: Outcome, *, alone: bool) -> Tensor | None:
        members = outcome.members
        known = self._parts[rank]
        if known is None or known[0] != members:
            memories = [self._memories[member] for member in members]
            part, parts = (0, 1) if alone else (members.index(rank), len(members))
            host = torch.device("cpu")
            mean = BlockMean(
                self._flats, memories, memories, device=host, part=part, parts=parts, outer=self._outer
            )
            known = self._parts[rank] = (members, mean)
        return known[1].reduce([outcome.samples[member] for member in members], drift=outcome.drift)


class _Copies:
    """Marks around one rank's copies of a round, down and up; reused `ROUNDS` rounds later."""

    def __init__(self, lane: Lane) -> None:
        self.round = -1
        self.down = (lane.event(timing=True), lane.event(timing=True))
        self.up = (lane.event(timing=True), lane.event(timing=True))


class HostMean:
    """Averages replicas on any devices on the host; see `Collective`.

    Memory: one pinned copy of the replica per CUDA rank, made before its first round and kept. Replicas on
    the CPU are averaged in place. `meet` is as in `MemoryMean`. With `outer` the means have an outer step,
    and all ranks one state for it, in the host's memory.

    Raises:
        OptionError: The replicas differ in structure.
    """

    masks = False

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        meet: Callable[[int], None],
        outer: OuterOptions | None = None,
    ) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self.outer: Sequence[OuterMomentum] = ()
        if outer is not None:
            with lanes[0].on(lanes[0].compute):
                replicas[0].gather()
                shared = OuterMomentum(outer, replicas[0].flats, torch.device("cpu"))
            self.outer = (shared,) * len(replicas)
        self._replicas = tuple(replicas)
        self._lanes = tuple(lanes)
        self._memories: list[list[Tensor]] = [
            [] if lane.is_async else replica.memories for replica, lane in zip(replicas, lanes, strict=True)
        ]
        state = self.outer[0] if self.outer else None
        self._mean = MemoryMean(replicas[0].flats, self._memories, meet, state)
        self._ready = [lane.event() for lane in lanes]
        self._copies = [[_Copies(lane) for _ in range(ROUNDS)] for lane in lanes]
        self._rounds = [0] * len(replicas)  # prepared, of each rank

    def prepare(self, rank: int, judge: Judge = unjudged) -> None:
        """See `Collective.prepare`. The host waits until the copy is down."""
        replica, lane = self._replicas[rank], self._lanes[rank]
        replica.gather()
        judge()
        if not lane.is_async:
            return
        memories = self._memories[rank]
        if not memories:
            with QUIET:
                memories += [lane.pinned(memory.shape, memory.dtype) for memory in replica.memories]
        self._rounds[rank] += 1
        copies = self._copies[rank][self._rounds[rank] % ROUNDS]
        copies.round = self._rounds[rank]
        self._ready[rank].record(lane.compute)
        lane.comm.wait_event(self._ready[rank])
        _copy(lane, replica.memories, memories, copies.down)
        copies.down[1].synchronize()

    def launch(self, outcome: Outcome) -> None:
        """Reduce a small model; see `Collective.launch`."""
        self._mean.launch(outcome)

    def average(self, rank: int, outcome: Outcome) -> Reading:
        """See `Collective.average`."""
        if not is_held(outcome):
            return lambda: NOTHING
        averaging = self._mean.average(rank, outcome)
        replica, lane, number = self._replicas[rank], self._lanes[rank], self._rounds[rank]
        if not lane.is_async:
            replica.scatter()
            return lambda: averaging
        copies = self._copies[rank][number % ROUNDS]
        _copy(lane, self._memories[rank], replica.memories, copies.up)
        lane.compute.wait_event(copies.up[1])
        replica.scatter()

        def read() -> Averaging:
            if copies.round != number:
                raise ProtocolError(f"rank {rank} read round {outcome.round} more than {ROUNDS} rounds late")
            copies.up[1].synchronize()
            copied_ms = sum(start.elapsed_time(end) for start, end in (copies.down, copies.up))
            return replace(averaging, sync_ms=averaging.sync_ms + copied_ms)

        return read

    def abort(self) -> None:
        """Nothing hangs here but workers in `meet`, which the gate releases."""

    def close(self) -> None:
        """There is nothing to give back."""


def _copy(
    lane: Lane, sources: Sequence[Tensor], targets: Sequence[Tensor], marks: tuple[Event, Event]
) -> None:
    """Copy between host and device on `comm`, between two marks."""
    start, end = marks
    with lane.on(lane.comm):
        start.record(lane.comm)
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        end.record(lane.comm)
