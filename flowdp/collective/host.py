"""The mean of replicas in the host's memory: those of CPU ranks where they lie, others through pinned copies.

A large model is reduced by all members together, each its own part of all replicas, between the gate and a
second meeting. A small one is reduced by the last arrival alone, while the others stand in the gate anyway:
that takes less time than the second meeting. A CUDA rank copies its replica down before the gate, and up
again behind the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import NOTHING, Averaging, Judge, Reading, is_held, unjudged
from flowdp.collective.machines_mean import MachinesMean
from flowdp.collective.mean import BlockMean, Part, Site, copy_all, drift_of
from flowdp.collective.on_streams import ROUNDS
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.network.team import Team
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["SMALL", "HostMean"]

SMALL = 1 << 18
"""Elements of a replica up to which one thread reduces alone. With two replicas of 100,000 float32 that takes
32 us a round instead of 46, with 400,000 as long, with a million it is slower (2 cores)."""

HOST = torch.device("cpu")


class _Copies:
    """Marks around one rank's copies of a round, down and up; reused `ROUNDS` rounds later."""

    def __init__(self, lane: Lane) -> None:
        self.down = (lane.event(timing=True), lane.event(timing=True))
        self.up = (lane.event(timing=True), lane.event(timing=True))


class HostMean:
    """Averages replicas on any devices on the host; see `Collective`.

    All members get the same bits, independent of speed and of the reducing rank. With `outer` the means have
    an outer step, and all ranks one state for it, in the host's memory: each reduces, and moves, a part of
    its own. With a `team` on several machines the means are of all of them, and inner rounds of this machine
    alone; indices of ranks are those of this machine then, outcomes are of all.

    Memory: one pinned copy of the replica per CUDA rank, made before its first round and kept. Replicas on
    the CPU are averaged in place.

    Args:
        replicas: One per rank of this machine.
        lanes: One per rank of this machine.
        meet: `meet(rank)` returns when all members of the round have called it and raises when the round
            was given up: the second meeting at the gate.
        outer: Outer step behind each mean; None: there is none.
        team: The ranks of all machines; None: these are all.
        overlaps: Means of all machines travel while these train on.
    """

    masks = False

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        meet: Callable[[int], None],
        outer: OuterOptions | None = None,
        team: Team | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self._replicas, self._lanes, self._meet = tuple(replicas), tuple(lanes), meet
        self._memories: list[list[Tensor]] = [
            [] if lane.is_async else replica.memories for replica, lane in zip(replicas, lanes, strict=True)
        ]
        self.outer: Sequence[OuterMomentum] = ()
        self._of_all: MachinesMean | None = None
        flats = replicas[0].flats
        is_spread = team is not None and team.is_spread
        with lanes[0].on(lanes[0].compute):
            if outer is not None or is_spread:
                replicas[0].gather()  # both start from the replica as it is
            if outer is not None:
                self.outer = (OuterMomentum(outer, flats, HOST),) * len(replicas)
            if team is not None and is_spread:
                state = self.outer[0] if self.outer else None
                is_difference = isinstance(replicas[0], FlatReplica)
                self._of_all = MachinesMean(
                    flats, self._memories, state, team, is_difference=is_difference, overlaps=overlaps
                )
        self._is_small = sum(flat.memory.numel() for flat in flats) <= SMALL
        # The range that each rank reduces, cut anew when the members change.
        self._parts: list[tuple[Sequence[int], BlockMean] | None] = [None] * len(replicas)
        # Squares of each member's part. A row is written before the meeting and read behind it; no rank
        # writes again before all readers have entered the gate of the next round.
        self._squares: list[Tensor | None] = [None] * len(replicas)
        self._launch_ms = 0.0
        self._ready = [lane.event() for lane in lanes]
        self._copies = [[_Copies(lane) for _ in range(ROUNDS)] for lane in lanes]
        self._rounds = [0] * len(replicas)  # prepared, of each rank

    @property
    def is_launched(self) -> bool:
        """Whether the launch leaves the mean in the memory of every replica: nothing is done behind it."""
        return self._is_small and not any(lane.is_async for lane in self._lanes)

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
        self._ready[rank].record(lane.compute)
        lane.comm.wait_event(self._ready[rank])
        _copy(lane, replica.memories, memories, copies.down)
        copies.down[1].synchronize()

    def launch(self, outcome: Outcome) -> None:
        """Reduce a small model, or that of all machines; see `Collective.launch`."""
        outcome = self._local(outcome)
        is_of_all = self._of_all is not None and not outcome.inner
        if not is_held(outcome) or not (is_of_all or self._is_small):
            return
        start = perf_counter()
        if self._of_all is not None and is_of_all:
            self._of_all.take(outcome)
        else:
            self._squares[outcome.members[0]] = self._reduce(outcome.members[0], outcome, alone=True)
        self._launch_ms = (perf_counter() - start) * 1e3

    def average(self, rank: int, outcome: Outcome) -> Reading:
        """Reduce this rank's part of a large model, and wait for the others'; see `Collective.average`.

        Raises:
            CollectiveAborted: The round was given up meanwhile.
        """
        outcome = self._local(outcome)
        if not is_held(outcome):
            return lambda: NOTHING
        averaging = self._averaged(rank, outcome)
        copies = self._copies[rank][self._rounds[rank] % ROUNDS]
        self._bring(rank, copies)
        if not self._lanes[rank].is_async:
            return lambda: averaging

        def read() -> Averaging:
            copies.up[1].synchronize()
            copied_ms = sum(start.elapsed_time(end) for start, end in (copies.down, copies.up))
            return replace(averaging, sync_ms=averaging.sync_ms + copied_ms)

        return read

    def settle(self, rank: int) -> None:
        """Bring the mean of all machines that is on its way into this rank's replica; see `Settle`.

        Threads: worker `rank`, all of this machine at one barrier.
        """
        assert self._of_all is not None
        self._of_all.settle()
        self._bring(rank, self._copies[rank][0])

    def abort(self) -> None:
        """Nothing hangs here but workers in `meet`, which the gate releases."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _local(self, outcome: Outcome) -> Outcome:
        """An inner outcome of this machine's ranks, by their places here; others are as they are."""
        if self._of_all is None or not outcome.inner:
            return outcome
        ranks = self._of_all.ranks
        members = tuple(rank - ranks.start for rank in outcome.members)
        return replace(outcome, members=members, samples=outcome.samples[ranks.start : ranks.stop])

    def _averaged(self, rank: int, outcome: Outcome) -> Averaging:
        """Reduce this rank's part of the mean, which is in the memories when this returns."""
        if self._of_all is not None and not outcome.inner:
            is_told = outcome.drift and outcome.samples[self._of_all.ranks[rank]]
            drift, norm = (self._of_all.drifts[rank], self._of_all.norm) if is_told else (None, None)
            return Averaging(self._launch_ms, drift, norm)
        if self._is_small:
            sync_ms, reducers = self._launch_ms, outcome.members[:1]
        else:
            start = perf_counter()
            self._squares[rank] = self._reduce(rank, outcome, alone=False)
            sync_ms, reducers = (perf_counter() - start) * 1e3, outcome.members
            self._meet(rank)
        if not (outcome.drift and outcome.samples[rank]):
            return Averaging(sync_ms, None)
        rows = [row.tolist() for reducer in reducers if (row := self._squares[reducer]) is not None]
        return Averaging(sync_ms, *drift_of(outcome.members.index(rank), rows))

    def _reduce(self, rank: int, outcome: Outcome, *, alone: bool) -> Tensor | None:
        members = outcome.members
        known = self._parts[rank]
        if known is None or known[0] != members:
            memories = [self._memories[member] for member in members]
            part = Part() if alone else Part(members.index(rank), len(members))
            outer = self.outer[0] if self.outer and self._of_all is None else None
            flats = self._replicas[0].flats
            mean = BlockMean(flats, memories, memories, site=Site(HOST), part=part, outer=outer)
            known = self._parts[rank] = (members, mean)
        return known[1].reduce([outcome.samples[member] for member in members], drift=outcome.drift)

    def _bring(self, rank: int, copies: _Copies) -> None:
        """Bring the mean from the host's memory to a rank's module."""
        replica, lane = self._replicas[rank], self._lanes[rank]
        if lane.is_async:
            _copy(lane, self._memories[rank], replica.memories, copies.up)
            lane.compute.wait_event(copies.up[1])
        replica.scatter()


def _copy(
    lane: Lane, sources: Sequence[Tensor], targets: Sequence[Tensor], marks: tuple[Event, Event]
) -> None:
    """Copy between host and device on `comm`, between two marks."""
    start, end = marks
    with lane.on(lane.comm):
        start.record(lane.comm)
        copy_all(sources, targets, non_blocking=True)
        end.record(lane.comm)
