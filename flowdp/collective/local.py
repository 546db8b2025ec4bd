"""The mean of replicas in one memory: no copy of the model, no queue and no pool.

A large model is reduced by all members together, each its own part of all replicas, between the gate and a
second meeting. A small one is reduced by the last arrival alone, while the others stand in the gate anyway:
that takes less time than the second meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from flowdp.collective.base import Averaging, BlockMean, relative_drift
from flowdp.device.tensors import FlatReplica
from flowdp.messages import Outcome

__all__ = ["SMALL", "LocalMean"]

SMALL = 1 << 18
"""Elements of a replica up to which one thread reduces alone. With two replicas of 100,000 float32 that takes
32 us a round instead of 46, with 400,000 as long, with a million it is slower (2 cores)."""


class LocalMean:
    """Averages replicas in place, in their flat memories.

    All members get the same bits, whoever was faster and whoever reduced.

    Args:
        replicas: One per rank.
        meet: `meet(rank)` returns when all members of the round have called it and raises when the round
            was given up: the second meeting at the gate.

    Raises:
        OptionError: The replicas differ in structure.
    """

    def __init__(self, replicas: Sequence[FlatReplica], meet: Callable[[int], None]) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self._replicas = tuple(replicas)
        self._meet = meet
        self.is_small = sum(memory.numel() for memory in replicas[0].memories) <= SMALL
        # What each rank reduces, cut anew when the members change.
        self._parts: list[tuple[Sequence[int], BlockMean] | None] = [None] * len(replicas)
        # Squares of each member's part. A row is written before the meeting and read behind it; nobody
        # writes again before all readers have entered the gate of the next round.
        self._squares: list[list[float]] = [[] for _ in replicas]
        self._launch_ms = 0.0

    def launch(self, outcome: Outcome) -> None:
        """Reduce a small model; see `Collective.launch`."""
        if self.is_small and len(outcome.members) > 1 and any(outcome.samples):
            start = perf_counter()
            self._squares[outcome.members[0]] = self._reduce(outcome.members[0], outcome, alone=True)
            self._launch_ms = (perf_counter() - start) * 1e3

    def average(self, rank: int, outcome: Outcome) -> Averaging:
        """See `Collective.average`."""
        if len(outcome.members) == 1 or not any(outcome.samples):
            return Averaging(0.0, None)
        if self.is_small:
            sync_ms, reducers = self._launch_ms, outcome.members[:1]
        else:
            start = perf_counter()
            self._squares[rank] = self._reduce(rank, outcome, alone=False)
            sync_ms, reducers = (perf_counter() - start) * 1e3, outcome.members
            self._meet(rank)
        drift = None
        if outcome.drift:
            rows = [self._squares[reducer] for reducer in reducers]
            own = outcome.members.index(rank)
            drift = relative_drift(sum(row[own] for row in rows), sum(row[-1] for row in rows))
        self._replicas[rank].scatter()
        return Averaging(sync_ms, drift)

    def _reduce(self, rank: int, outcome: Outcome, *, alone: bool) -> list[float]:
        members = outcome.members
        known = self._parts[rank]
        if known is None or known[0] != members:
            memories = [self._replicas[member].memories for member in members]
            part, parts = (0, 1) if alone else (members.index(rank), len(members))
            mean = BlockMean(self._replicas[rank].flats, memories, memories, part=part, parts=parts)
            known = self._parts[rank] = (members, mean)
        return known[1].reduce([outcome.samples[member] for member in members], drift=outcome.drift)
