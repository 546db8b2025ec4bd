"""Common part of all collectives on CUDA streams: the order of work, and results for the host.

One round, per rank::

    compute   ... step | gather | judge | ready    (waits done) | outer step | scatter | step ...
    comm      (waits every member's ready) | start | arithmetic | behind it | done | drift to host | arrived
    host      prepare, gate, launch by the last arrival, average      ...rounds later: the reading

Only a reader waits on the host, and by then the device has long passed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import Tensor, float64

from flowdp.collective.base import NOTHING, Averaging, Judge, Reading, is_held, unjudged
from flowdp.collective.fused import MEMBERS, Kernels, kernels_on
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import OptionError
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["ROUNDS", "StreamedMean"]

ROUNDS = 8
"""Rounds whose times and drift are kept for a late reading. The host runs a few steps ahead of the device, so
at one round a step a reading comes a few rounds late."""


class _RoundMarks:
    """Marks of one round, and memory where its drift arrives; reused `ROUNDS` rounds later."""

    def __init__(self, lanes: Sequence[Lane], rows: Sequence[Tensor]) -> None:
        self.start = [lane.event(timing=True) for lane in lanes]
        self.done = [lane.event(timing=True) for lane in lanes]
        self.arrived = [lane.event() for lane in lanes]
        self.rows = rows
        self.workers: Sequence[int] = ()
        self.reporters: Sequence[int] = ()


class StreamedMean(ABC):
    """A collective whose arithmetic runs on the comm streams; see `Collective`.

    A worker reports `width` numbers at most. With `outer` each rank takes the same outer step behind the
    mean, with a state of its own on its device.

    Ranks are counted from the first of this process (`first`), but in outcomes, which are of all.

    Raises:
        OptionError: A rank trains on the CPU.
    """

    masks = True
    first = 0

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        width: int,
        outer: OuterOptions | None = None,
    ) -> None:
        for replica, lane in zip(replicas, lanes, strict=True):
            if not lane.is_async:
                raise OptionError(
                    f"rank {replica.rank} trains on {lane.device}, which has no streams; ranks on the CPU "
                    "and on CUDA devices average together in the host's memory: backend='cpu'"
                )
        self._replicas = tuple(replicas)
        self._lanes = tuple(lanes)
        self._ready = [lane.event() for lane in lanes]
        self._bad: list[Tensor | None] = [None] * len(lanes)  # verdict of each rank
        self._kernels: list[Kernels | None] = [None] * len(lanes)
        self._is_alone = len(lanes) == 1  # no other replica replaces a bad one
        with QUIET:
            pinned = [lane.pinned((ROUNDS, width), float64).unbind() for lane in lanes]
        self._marks = [_RoundMarks(lanes, rows) for rows in zip(*pinned, strict=True)]
        self.outer: Sequence[OuterMomentum] = ()
        if outer is not None:
            self.outer = [_momentum(outer, *pair) for pair in zip(replicas, lanes, strict=True)]
        self._held = 0
        # Of the last launch. Every member reads it between two gates, and none launches meanwhile.
        self._latest = self._marks[0]

    def prepare(self, rank: int, judge: Judge = unjudged) -> None:
        """See `Collective.prepare`.

        A replica that does not count is written over with zeros, as NaN times 0 is NaN; the mean follows.
        """
        self._replicas[rank].gather()
        bad = self._bad[rank] = judge()
        if bad is not None and not self._is_alone:
            kernels, is_sound = self._kernels[rank], bad.logical_not().double()
            for flat in self._replicas[rank].flats:
                if kernels is not None and kernels.take([flat.memory]):
                    kernels.scale(flat.memory, is_sound)
                elif not flat.counts:
                    flat.memory.masked_fill_(bad, 0.0)
        self._ready[rank].record(self._lanes[rank].compute)

    def launch(self, outcome: Outcome, behind: Callable[[], object] = lambda: None) -> None:
        """See `Collective.launch`; `behind` enqueues more on the comm streams, as a part of the round."""
        if not is_held(outcome):
            return
        marks = self._marks[self._held % ROUNDS]
        self._held += 1
        marks.workers = self._workers(outcome)
        with QUIET:  # for the kernels of a group, and for scratch that is made at the first use
            for worker in marks.workers:
                comm = self._lanes[worker].comm
                for member in self._here(outcome):
                    comm.wait_event(self._ready[member])
                marks.start[worker].record(comm)
            reports = self._enqueue(outcome, marks.workers)
            behind()
            for worker in marks.workers:
                marks.done[worker].record(self._lanes[worker].comm)
            for reporter, report in reports.items():
                lane = self._lanes[reporter]
                with lane.on(lane.comm):
                    marks.rows[reporter][: len(report)].copy_(report, non_blocking=True)
                marks.arrived[reporter].record(lane.comm)
        marks.reporters = tuple(reports)
        self._latest = marks

    def average(self, rank: int, outcome: Outcome) -> Reading:
        """See `Collective.average`."""
        if not is_held(outcome):
            return lambda: NOTHING
        marks = self._latest
        writers = self._writers(rank, marks.workers)
        for writer in writers:
            self._lanes[rank].compute.wait_event(marks.done[writer])
        if self.outer and not outcome.inner:
            self.outer[rank].step(self._replicas[rank].memories)
        self._replicas[rank].scatter()
        return lambda: self._read(rank, outcome, marks, writers)

    def abort(self) -> None:  # noqa: B027 - no method of the subclasses that have nothing to do here
        """Ordinary kernels do not wait for other devices, so none hangs."""

    def close(self) -> None:
        """Wait for the last round's work, which writes to memory that is freed next."""
        with ExitStack() as draining:  # of every lane, also where the device of one is dead
            for lane in self._lanes:
                draining.callback(lane.drain)

    def _load_kernels(self) -> None:
        """Compile the kernels, where there are any, before the first round."""
        with QUIET:
            members = min(len(self._lanes), MEMBERS)
            self._kernels = [kernels_on(lane.device, members) for lane in self._lanes]

    def _here(self, outcome: Outcome) -> Sequence[int]:
        """Members of a round that are ranks of this process."""
        return outcome.members

    def _workers(self, outcome: Outcome) -> Sequence[int]:
        """The ranks whose comm streams work in this round."""
        return self._here(outcome)

    @abstractmethod
    def _writers(self, rank: int, workers: Sequence[int]) -> Sequence[int]:
        """The workers that write this rank's memory."""

    @abstractmethod
    def _enqueue(self, outcome: Outcome, workers: Sequence[int]) -> dict[int, Tensor]:
        """Put the arithmetic on the comm streams of the workers.

        Returns:
            Numbers that some workers report: float64 on their device, at most `width`. They are written
            anew in the next round. Empty where the drift is not measured.
        """

    @abstractmethod
    def add_up(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Enqueue the sum of one number of each rank, for each; behind a mean. The numbers may change."""

    @abstractmethod
    def spread(self, replicas: Sequence[FlatTensors]) -> None:
        """Enqueue that all ranks get each one's span of these memories; behind a mean."""

    @abstractmethod
    def _drift(self, rank: int, outcome: Outcome, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        """The drift of a rank and the norm of the mean, from the workers' numbers, in order.

        NaN where no member counted.
        """

    def _read(self, rank: int, outcome: Outcome, marks: _RoundMarks, writers: Sequence[int]) -> Averaging:
        for writer in writers:
            marks.done[writer].synchronize()
        sync_ms = max(marks.start[writer].elapsed_time(marks.done[writer]) for writer in writers)
        drift = norm = None
        if outcome.drift and outcome.samples[self.first + rank]:
            for reporter in marks.reporters:
                marks.arrived[reporter].synchronize()
            rows = [marks.rows[reporter].tolist() for reporter in marks.reporters]
            drift, norm = self._drift(rank, outcome, rows)
        return Averaging(sync_ms, drift, norm)


def _momentum(outer: OuterOptions, replica: FlatTensors, lane: Lane) -> OuterMomentum:
    """The state of a rank; its step is enqueued where this is, on `compute`."""
    with lane.on(lane.compute):
        replica.gather()
        return OuterMomentum(outer, replica.flats)
