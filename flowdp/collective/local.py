"""The mean of replicas on CUDA devices where they lie, by ordinary kernels and copies.

The last arrival at the gate enqueues everything, for all members. Replicas on one card are one memory; on
several cards each card reduces a part of all replicas, and remote memory is copied over block by block. Of
memory that is cut each rank reduces its own span. Torch
lets a copy between two cards wait for the current streams of both, and both for the copy. So each part has
streams of its own on the other cards, or the cards would work one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import sqrt

import torch
from torch import Tensor

from flowdp.collective.base import BlockMean, relative_drift
from flowdp.collective.on_streams import StreamedMean
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import Lane
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["DeviceMean"]


class DeviceMean(StreamedMean):
    """Averages replicas on CUDA devices in place, by ordinary kernels and copies; see `Collective`.

    All members get the same bits: each block is averaged once, on the card of one of them. Several lanes may
    be of one device.

    Raises:
        OptionError: The replicas differ in structure, or a rank trains on the CPU.
    """

    def __init__(
        self, replicas: Sequence[FlatTensors], lanes: Sequence[Lane], outer: OuterOptions | None = None
    ) -> None:
        super().__init__(replicas, lanes, width=len(replicas) + 1, outer=outer)
        self._plan: tuple[Sequence[int], dict[int, BlockMean]] = ((), {})
        self._is_cut = any(flat.spans > 1 for flat in replicas[0].flats)
        self._done = [lane.event() for lane in lanes]  # of the spans

    def _workers(self, outcome: Outcome) -> Sequence[int]:
        """The first member on each card; all of them, where each has a span."""
        if self._is_cut:
            return outcome.members
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
        rows = {}
        for part, worker in enumerate(workers):
            if self._is_cut:  # into its own memory
                members = (worker, *(member for member in outcome.members if member != worker))
            samples = [outcome.samples[member] for member in members]
            bad = [self._bad[member] for member in members]
            with self._at(part, workers):
                if worker not in means:
                    means[worker] = self._mean_of(members, worker, part, len(workers))
                squares = means[worker].reduce(samples, drift=outcome.drift, bad=bad)
            if squares is not None:
                rows[worker] = squares
        if self._is_cut:
            self._meet()
        return rows

    def add_up(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `StreamedMean.add_up`."""
        self._meet()
        sums = []
        for rank, number in enumerate(numbers):
            with self._at(rank, range(len(numbers))):
                sums.append(torch.stack([one.to(number.device) for one in numbers]).sum())
        return sums

    def spread(self, replicas: Sequence[FlatTensors]) -> None:
        """See `StreamedMean.spread`."""
        for rank, own in enumerate(replicas):
            with self._at(rank, range(len(replicas))):
                for other in replicas:
                    for mine, theirs in zip(own.flats, other.flats, strict=True):
                        if other is not own and mine.split:
                            theirs.memory[mine.span(rank)].copy_(mine.memory[mine.span(rank)])

    def _meet(self) -> None:
        """Let the comm streams of all ranks wait for each other."""
        for lane, done in zip(self._lanes, self._done, strict=True):
            done.record(lane.comm)
        for lane in self._lanes:
            for done in self._done:
                lane.comm.wait_event(done)

    @contextmanager
    def _at(self, part: int, workers: Sequence[int]) -> Iterator[None]:
        """Make a worker's comm stream current, and on other cards one that goes with it."""
        with ExitStack() as stack:
            for other in workers:
                if other != workers[part]:
                    lane = self._lanes[other]
                    stack.enter_context(lane.on(lane.aside(part)))
            lane = self._lanes[workers[part]]
            stack.enter_context(lane.on(lane.comm))
            yield

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
            is_cut=self._is_cut,
        )

    def _drift(self, rank: int, outcome: Outcome, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        own, last = outcome.members.index(rank), len(outcome.members)
        mean_square = sum(row[last] for row in rows)
        return relative_drift(sum(row[own] for row in rows), mean_square), sqrt(mean_square)
