"""The mean of replicas where they lie: no copy of the model, no queue and no pool.

On the CPU a large model is reduced by all members together, each its own part of all replicas, between the
gate and a second meeting. A small one is reduced by the last arrival alone, while the others stand in the
gate anyway: that takes less time than the second meeting.

On CUDA the last arrival enqueues everything, for all members. Replicas on one card are one memory; on several
cards each card reduces a part of all replicas, and remote memory is copied over block by block. Torch
lets a copy between two cards wait for the current streams of both, and both for the copy. So each part has
streams of its own on the other cards, or the cards would work one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from flowdp.collective.on_streams import StreamedMean
from flowdp.device.flat_parameters import Flat, FlatTensors
from flowdp.device.streams import Lane
from flowdp.protocol.messages import Outcome

__all__ = ["SMALL", "DeviceMean", "LocalMean", "MemoryMean"]

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
    """

    def __init__(
        self, flats: Sequence[Flat], memories: Sequence[Sequence[Tensor]], meet: Callable[[int], None]
    ) -> None:
        self._flats = flats
        self._memories = memories
        self._meet = meet
        self.is_small = sum(flat.memory.numel() for flat in flats) <= SMALL
        # The range that each rank reduces, cut anew when the members change.
        self._parts: list[tuple[Sequence[int], BlockMean] | None] = [None] * len(memories)
        # Squares of each member's part. A row is written before the meeting and read behind it; nobody
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
            mean = BlockMean(self._flats, memories, memories, device=host, part=part, parts=parts)
            known = self._parts[rank] = (members, mean)
        return known[1].reduce([outcome.samples[member] for member in members], drift=outcome.drift)


class LocalMean:
    """Averages replicas on the CPU in place, in their flat memories; see `Collective`.

    Args:
        replicas: One per rank.
        meet: As in `MemoryMean`.

    Raises:
        OptionError: The replicas differ in structure.
    """

    masks = False

    def __init__(self, replicas: Sequence[FlatTensors], meet: Callable[[int], None]) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self._replicas = tuple(replicas)
        self._mean = MemoryMean(replicas[0].flats, [replica.memories for replica in replicas], meet)

    def prepare(self, rank: int, judge: Judge = unjudged) -> None:
        """See `Collective.prepare`."""
        self._replicas[rank].gather()
        judge()

    def launch(self, outcome: Outcome) -> None:
        """Reduce a small model; see `Collective.launch`."""
        self._mean.launch(outcome)

    def average(self, rank: int, outcome: Outcome) -> Reading:
        """See `Collective.average`."""
        if not is_held(outcome):
            return lambda: NOTHING
        averaging = self._mean.average(rank, outcome)
        self._replicas[rank].scatter()
        return lambda: averaging

    def abort(self) -> None:
        """Nothing hangs here but workers in `meet`, which the gate releases."""

    def close(self) -> None:
        """There is nothing to give back."""


class DeviceMean(StreamedMean):
    """Averages replicas on CUDA devices in place, by ordinary kernels and copies; see `Collective`.

    All members get the same bits: each block is averaged once, on the card of one of them.

    Args:
        replicas: One per rank.
        lanes: One per rank; several may be of one device.

    Raises:
        OptionError: The replicas differ in structure, or a rank trains on the CPU.
    """

    def __init__(self, replicas: Sequence[FlatTensors], lanes: Sequence[Lane]) -> None:
        super().__init__(replicas, lanes, width=len(replicas) + 1)
        self._plan: tuple[Sequence[int], dict[int, BlockMean]] = ((), {})

    def _workers(self, outcome: Outcome) -> Sequence[int]:
        """The first member on each card."""
        first: dict[torch.device, int] = {}
        for member in outcome.members:
            first.setdefault(self._lanes[member].device, member)
        return tuple(first.values())

    def _writers(self, _rank: int, workers: Sequence[int]) -> Sequence[int]:  # of every rank
        return workers

    def _enqueue(self, outcome: Outcome, workers: Sequence[int]) -> dict[int, Tensor]:
        members = outcome.members
        if self._plan[0] != members:
            self._plan = members, {}
        means = self._plan[1]
        samples = [outcome.samples[member] for member in members]
        bad = [self._bad[member] for member in members]
        rows = {}
        for part, worker in enumerate(workers):
            with ExitStack() as stack:
                for other in workers:
                    if other != worker:
                        lane = self._lanes[other]
                        stack.enter_context(lane.on(lane.aside(part)))
                stack.enter_context(self._lanes[worker].on(self._lanes[worker].comm))
                if worker not in means:
                    means[worker] = self._mean_of(members, worker, part, len(workers))
                squares = means[worker].reduce(samples, drift=outcome.drift, bad=bad)
            if squares is not None:
                rows[worker] = squares
        return rows

    def _mean_of(self, members: Sequence[int], worker: int, part: int, parts: int) -> BlockMean:
        here = self._lanes[worker].device
        memories = [self._replicas[member].memories for member in members]
        return BlockMean(
            self._replicas[worker].flats,
            memories,
            memories,
            part=part,
            parts=parts,
            far=[at for at, member in enumerate(members) if self._lanes[member].device != here],
        )

    def _drift(self, rank: int, outcome: Outcome, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        own, last = outcome.members.index(rank), len(outcome.members)
        mean_square = sum(row[last] for row in rows)
        return relative_drift(sum(row[own] for row in rows), mean_square), sqrt(mean_square)
