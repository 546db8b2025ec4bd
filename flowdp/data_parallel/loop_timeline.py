"""The timeline of a loop that the user owns, and its report: what each device does, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from time import perf_counter

import torch

from flowdp.device.stopwatch import Stopwatch
from flowdp.device.streams import Lane
from flowdp.policy.efficiency import Activity, EfficiencyReport, RankTimes, efficiency_of
from flowdp.timeline.record import TimelineRound
from flowdp.timeline.timeline import open_timeline

__all__ = ["LoopTimeline", "whole_lane"]

Piece = tuple[Activity, float, float]
"""An activity, its start and its end."""


class LoopTimeline:
    """Writes the steps of a loop into a timeline.

    Args:
        lanes: One per rank.
        name: Name of the module.

    Attributes:
        timeline: The timeline.
        watches: Stopwatches of one device: of its steps, and one without work for the sums.

    Threads: the user's; any may read the timeline and the report.
    """

    def __init__(self, lanes: Sequence[Lane], name: str) -> None:
        self.timeline = open_timeline([lane.device for lane in lanes], 0, f"{name} in setup()")
        self.watches = tuple(Stopwatch(lanes[0], keeps=True) for _ in range(2))
        self._times = [RankTimes() for _ in lanes]
        self._alone: AbstractContextManager[None] | None = None  # times a step of the first device alone
        self._alone_samples = 0
        self._steps = 0
        self._begun_s = self._at_s = perf_counter()
        self.timeline.begin(self.report)
        self.timeline.start()

    def begin_alone(self, watch: Stopwatch, samples: int) -> None:
        """Begin a step of the first device alone with this call, if none is under way."""
        if self._alone is None and torch.is_grad_enabled():
            self._alone = watch.running(Activity.STEP)
            self._alone.__enter__()
        self._alone_samples += samples

    def end_alone(self) -> int:
        """End such a step; returns its samples, 0 without one."""
        samples = 0
        if self._alone is not None:
            self._alone.__exit__(None, None, None)
            samples = self._alone_samples
        self._alone, self._alone_samples = None, 0
        return samples

    def take(
        self, watches: Sequence[Stopwatch], samples: Sequence[int], share: Sequence[float], anchor: int
    ) -> None:
        """Write a step whose times are known.

        Args:
            watches: Of each rank, and behind them that of the sums.
            samples: Of each rank. Shape (world_size,).
            share: Shares of the ranks from now on, where they have changed; else empty. Shape (world_size,).
            anchor: Steps of the slowest rank in a window; 0 where batches are cut.
        """
        *own, sums = [watch.spans for watch in watches]
        rows = [sorted([*pieces, *sums], key=lambda piece: piece[1]) for pieces in own]
        busy = _union(sorted(piece[1:] for row in rows for piece in row))
        waiting = Activity.GATE if sum(count > 0 for count in samples) > 1 else Activity.IDLE
        for rank, row in enumerate(rows):
            for activity, start_s, end_s in whole_lane(row, busy, self._at_s, waiting):
                self.timeline.ranks[rank].add(activity, start_s, end_s)
                self._times[rank].add(activity, (end_s - start_s) * 1e3)
            self._times[rank].samples += samples[rank]
        before_s, self._at_s = self._at_s, max([self._at_s, *(end for _, end in busy)])
        self._steps += 1
        done = TimelineRound(
            at_ms=self.timeline.wall_ms,
            wall_ms=(self._at_s - before_s) * 1e3,
            rounds=1,
            global_step=self._steps,
            loss=math.nan,
            lr=math.nan,
            anchor=anchor,
            drift=math.nan,
            samples=tuple(samples),
        )
        self.timeline.add_round(done, share)

    def report(self) -> EfficiencyReport:
        """Attribute the time of all devices so far."""
        for times in self._times:
            times.wall_ms = (self._at_s - self._begun_s) * 1e3
        return efficiency_of(self._times, self.timeline.devices)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times in which some device works, from sorted ones that may overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            start, last = merged.pop()
            end = max(end, last)
        merged.append((start, end))
    return merged


def whole_lane(
    row: Sequence[Piece], busy: Sequence[tuple[float, float]], since: float, waiting: Activity
) -> Iterator[Piece]:
    """The pieces of a rank, and all between them: the others' work, and the code of the user.

    Args:
        row: The rank's, by their starts.
        busy: Times in which some rank works, in order.
        since: Where the step before has ended.
        waiting: Activity of a rank while others work.
    """
    at = since
    for begin, end in busy:
        if begin > at:
            yield Activity.OWN, at, begin
        at = max(at, begin)
        for activity, start, stop in row:
            if not begin <= start < end or stop <= at:
                continue
            if start > at:
                yield waiting, at, start
            yield activity, max(at, start), stop
            at = stop
        if end > at:
            yield waiting, at, end
            at = end
