"""The mean of replicas in one memory: every member reduces its own part of all of them.

No copy of the model, no queue and no pool: the members' own threads do the work between two meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from flowdp.collective.base import Averaging, BlockMean, relative_drift
from flowdp.device.tensors import FlatReplica

__all__ = ["LocalMean"]


class LocalMean:
    """Averages replicas in place, in their flat memories.

    Every member writes the same part of all replicas, so all get the same bits, whoever was faster.

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
        # What each rank reduces, cut anew when the members change.
        self._parts: list[tuple[Sequence[int], BlockMean] | None] = [None] * len(replicas)
        # Squares of each member's part. A row is written before the meeting and read behind it; nobody
        # writes again before all readers have entered the gate of the next round.
        self._squares: list[list[float]] = [[] for _ in replicas]

    def average(self, rank: int, members: Sequence[int], samples: Sequence[int], *, drift: bool) -> Averaging:
        """See `Collective.average`.

        Raises:
            ProtocolError: No member has samples.
        """
        start = perf_counter()
        weights = [samples[member] for member in members]
        self._squares[rank] = self._part(rank, members).reduce(weights, drift=drift)
        reduced = perf_counter()
        self._meet(rank)
        met = perf_counter()
        distance = None
        if drift:
            rows = [self._squares[member] for member in members]
            own = members.index(rank)
            distance = relative_drift(sum(row[own] for row in rows), sum(row[-1] for row in rows))
        self._replicas[rank].scatter()
        wait = met - reduced
        return Averaging((perf_counter() - start - wait) * 1e3, wait * 1e3, distance)

    def _part(self, rank: int, members: Sequence[int]) -> BlockMean:
        known = self._parts[rank]
        if known is None or known[0] != members:
            memories = [self._replicas[member].memories for member in members]
            mean = BlockMean(
                self._replicas[rank].flats, memories, memories, part=members.index(rank), parts=len(members)
            )
            known = self._parts[rank] = (members, mean)
        return known[1]
