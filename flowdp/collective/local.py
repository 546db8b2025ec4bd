"""The mean of replicas on CUDA devices where they lie, by ordinary kernels and copies.

The last arrival at the gate enqueues everything, for all members. Replicas on one card are one memory; on
several cards each card reduces a part of all replicas, and remote memory is copied over block by block: the
next one comes in, and the last mean goes out, while a block is summed. Of memory that is cut each rank
reduces its own span. Torch lets a copy between two cards wait for the current streams of both, and both for
the copy. So each part has streams of its own on all cards, or they would work one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from flowdp.collective.fused import kernels_on
from flowdp.collective.mean import BlockMean, Carrier, Part, Site, drift_of
from flowdp.collective.on_streams import StreamedMean
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import Lane, Stream
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["DeviceMean"]


class DeviceMean(StreamedMean):
    """Averages replicas on CUDA devices in place, by ordinary kernels and copies; see `Collective`.

    All members get the same bits: each block is averaged once, on the card of one of them. Several lanes may
    be of one device.

    Args:
        replicas: One per rank.
        lanes: One per rank.
        outer: Outer step behind each mean; None: there is none.
        by_torch: Without kernels of flowdp's own.

    Raises:
        OptionError: A rank trains on the CPU.
    """

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        outer: OuterOptions | None = None,
        *,
        by_torch: bool = False,
    ) -> None:
        super().__init__(replicas, lanes, width=len(replicas) + 1, outer=outer)
        self._plan: tuple[Sequence[int], dict[int, BlockMean]] = ((), {})
        self._is_cut = any(flat.spans > 1 for flat in replicas[0].flats)
        self._done = [lane.event() for lane in lanes]  # of the spans
        if len(lanes) > 1 and not by_torch:
            self._load_kernels()

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
                sums.append(torch.stack([term.to(number.device) for term in numbers]).sum())
        return sums

    def spread(self, replicas: Sequence[FlatTensors]) -> None:
        """See `StreamedMean.spread`."""
        for rank, giver in enumerate(replicas):
            with self._at(rank, range(len(replicas))):
                for other in replicas:
                    for mine, theirs in zip(giver.flats, other.flats, strict=True):
                        if other is not giver and mine.split:
                            theirs.memory[mine.span(rank)].copy_(mine.memory[mine.span(rank)])

    def _meet(self) -> None:
        """Let the comm streams of all ranks wait for each other."""
        for lane, done in zip(self._lanes, self._done, strict=True):
            done.record(lane.comm)
        for lane in self._lanes:
            for done in self._done:
                lane.comm.wait_event(done)

    def _at(self, part: int, workers: Sequence[int]) -> AbstractContextManager[None]:
        """Make a worker's comm stream current, and on other cards one that goes with it."""
        lane, others = self._lanes[workers[part]], [*workers[:part], *workers[part + 1 :]]
        return _on_each(lane, lane.comm, [self._lanes[other] for other in others], part)

    def _mean_of(self, members: Sequence[int], worker: int, part: int, parts: int) -> BlockMean:
        here = self._lanes[worker].device
        memories = [self._replicas[member].memories for member in members]
        lanes = {self._lanes[member].device: self._lanes[member] for member in members}
        others = [lane for device, lane in lanes.items() if device != here]
        site = Site(
            kernels=None if self._kernels[worker] is None else kernels_on(here, len(members)),
            far=[at for at, member in enumerate(members) if self._lanes[member].device != here],
            carrier=_Ahead(self._lanes[worker], others, part, parts) if others else Carrier(),
        )
        flats = self._replicas[worker].flats
        return BlockMean(flats, memories, memories, site=site, part=Part(part, parts, self._is_cut))

    def _drift(self, rank: int, outcome: Outcome, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        members = len(outcome.members)
        return drift_of(outcome.members.index(rank), (row[: members + 1] for row in rows))


class _Ahead(Carrier):
    """Copies of one part on streams of their own, in both directions, beside the sums on `comm`.

    Args:
        lane: Where the sums are.
        others: A lane of each other card.
        part: Index of the part.
        parts: Number of parts.
    """

    slots = 2

    def __init__(self, lane: Lane, others: Sequence[Lane], part: int, parts: int) -> None:
        self._lane = lane
        self._others = others
        self._numbers = part, parts + part  # of the streams in, and out
        self._in, self._out = (lane.aside(number) for number in self._numbers)
        self._begun, self._sent = lane.event(), lane.event()
        self._fetched = [lane.event() for _ in range(self.slots)]
        self._summed = [lane.event() for _ in range(self.slots)]

    def begin(self) -> None:
        """See `Carrier.begin`."""
        self._begun.record(self._lane.comm)
        self._in.wait_event(self._begun)

    def fetch(self, slot: int, copy: Callable[[], object]) -> None:
        """See `Carrier.fetch`."""
        self._in.wait_event(self._summed[slot])
        with _on_each(self._lane, self._in, self._others, self._numbers[0]):
            copy()
        self._fetched[slot].record(self._in)

    def await_fetch(self, slot: int) -> None:
        """See `Carrier.await_fetch`."""
        self._lane.comm.wait_event(self._fetched[slot])

    def send(self, slot: int, copy: Callable[[], object]) -> None:
        """See `Carrier.send`."""
        self._summed[slot].record(self._lane.comm)
        self._out.wait_event(self._summed[slot])
        with _on_each(self._lane, self._out, self._others, self._numbers[1]):
            copy()

    def end(self) -> None:
        """See `Carrier.end`."""
        self._sent.record(self._out)
        self._lane.comm.wait_event(self._sent)


@contextmanager
def _on_each(lane: Lane, stream: Stream, others: Iterable[Lane], number: int) -> Iterator[None]:
    """Make a stream current, and on other lanes the one of a number."""
    with ExitStack() as stack:
        for other in others:
            stack.enter_context(other.on(other.aside(number)))
        stack.enter_context(lane.on(stream))
        yield
