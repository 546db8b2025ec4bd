"""The mean of replicas through the host's memory: where devices cannot reach each other.

Each rank copies its replica down before the gate, the members average the copies as replicas on the CPU are
averaged, and each copies its own up again. CPU ranks take part with the memory they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from flowdp.collective.base import NOTHING, Averaging, Judge, Reading, is_held, unjudged
from flowdp.collective.local import MemoryMean
from flowdp.collective.on_streams import ROUNDS
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import ProtocolError
from flowdp.protocol.messages import Outcome

__all__ = ["HostMean"]


class _Copies:
    """The four marks of one rank's two copies in one round: used again `ROUNDS` rounds later."""

    def __init__(self, lane: Lane) -> None:
        self.round = -1
        self.down = (lane.event(timing=True), lane.event(timing=True))
        self.up = (lane.event(timing=True), lane.event(timing=True))


class HostMean:
    """Averages replicas on any devices on the host; see `Collective`.

    Memory: one pinned copy of the replica per CUDA rank, made before its first round and kept.

    Args:
        replicas: One per rank.
        lanes: One per rank.
        meet: As in `MemoryMean`.

    Raises:
        OptionError: The replicas differ in structure.
    """

    masks = False

    def __init__(
        self, replicas: Sequence[FlatTensors], lanes: Sequence[Lane], meet: Callable[[int], None]
    ) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self._replicas = tuple(replicas)
        self._lanes = tuple(lanes)
        self._memories: list[list[Tensor]] = [
            [] if lane.is_async else replica.memories for replica, lane in zip(replicas, lanes, strict=True)
        ]
        self._mean = MemoryMean(replicas[0].flats, self._memories, meet)
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
