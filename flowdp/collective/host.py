"""The mean of replicas in the host's memory: those of CPU ranks where they lie, others through pinned copies.

A large model is reduced by all members together, each its own part of all replicas, between the gate and a
second meeting. A small one is reduced by the last arrival alone, while the others stand in the gate anyway:
that takes less time than the second meeting. A CUDA rank copies its replica down before the gate, and up
again behind the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowdp.collective.base import (
    NOTHING,
    Averaging,
    Judge,
    Reading,
    is_held,
    unjudged,
)
from flowdp.collective.machines_mean import MachinesMean
from flowdp.collective.memory_mean import MemoryMean
from flowdp.collective.on_streams import ROUNDS
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import ProtocolError
from flowdp.network.team import Team
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["HostMean"]


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
    and all ranks one state for it, in the host's memory. With a `team` on several machines the means are of
    all of them; indices of ranks are those of this machine then, outcomes are of all.

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
        team: Team | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self.outer: Sequence[OuterMomentum] = ()
        is_spread = team is not None and team.is_spread
        if outer is not None or is_spread:  # both start from the replica as it is
            with lanes[0].on(lanes[0].compute):
                replicas[0].gather()
        if outer is not None:
            with lanes[0].on(lanes[0].compute):
                shared = OuterMomentum(outer, replicas[0].flats, torch.device("cpu"))
            self.outer = (shared,) * len(replicas)
        self._replicas = tuple(replicas)
        self._lanes = tuple(lanes)
        self._memories: list[list[Tensor]] = [
            [] if lane.is_async else replica.memories for replica, lane in zip(replicas, lanes, strict=True)
        ]
        state = self.outer[0] if self.outer else None
        self._mean = MemoryMean(replicas[0].flats, self._memories, meet, state)
        self._of_all: MachinesMean | None = None
        if team is not None and team.is_spread:
            with lanes[0].on(lanes[0].compute):
                self._mean = self._of_all = MachinesMean(
                    replicas[0].flats,
                    self._memories,
                    meet,
                    state,
                    team,
                    is_difference=isinstance(replicas[0], FlatReplica),
                    overlaps=overlaps,
                )
        self._ready = [lane.event() for lane in lanes]
        self._copies = [[_Copies(lane) for _ in range(ROUNDS)] for lane in lanes]
        self._rounds = [0] * len(replicas)  # prepared, of each rank

    @property
    def is_launched(self) -> bool:
        """Whether the launch leaves the mean in the memory of every replica: nothing is done behind it."""
        return self._mean.is_small and not any(lane.is_async for lane in self._lanes)

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

    def settle(self, rank: int) -> None:
        """Bring the mean of all machines that is on its way into this rank's replica; see `Settle`.

        Threads: worker `rank`, all of this machine at one barrier.
        """
        assert self._of_all is not None
        self._of_all.settle()
        replica, lane = self._replicas[rank], self._lanes[rank]
        if lane.is_async:
            _copy(lane, self._memories[rank], replica.memories, self._copies[rank][0].up)
            lane.compute.wait_event(self._copies[rank][0].up[1])
        replica.scatter()

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
