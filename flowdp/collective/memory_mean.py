"""The mean of memories of the host: by the last arrival alone, or by all members, each a part of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import Averaging, BlockMean, is_held, relative_drift
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import Flat
from flowdp.protocol.messages import Outcome

__all__ = ["SMALL", "MemoryMean"]

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
