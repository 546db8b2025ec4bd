"""Spans of a rank: from when to when it did something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowdp.policy.efficiency import Activity
from flowdp.timeline.rows import Matrix, Rows

__all__ = ["CAPACITY", "ORDER", "RankSpans", "Span", "merged"]

CAPACITY = 16_384
"""Spans that are kept of each activity of a rank: 0.5 MB."""

ORDER = tuple(Activity)
"""Activities in the order of their tracks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a rank spent on one activity, or on several of the same kind that were merged.

    Attributes:
        rank: Rank index.
        activity: Its use.
        start_ms: Start, since the run began.
        end_ms: End, since the run began.
        busy_ms: Time of the activity within; less than the length where several were merged.
        count: How many were merged: steps, rounds, batches. 0 of one that continues another.
    """

    rank: int
    activity: Activity
    start_ms: float
    end_ms: float
    busy_ms: float
    count: int


def merged(one: Sequence[Any], following: Sequence[Any]) -> tuple[Any, ...]:
    """Merge spans with their next ones: (start, end, busy, count)."""
    return one[0], following[1], one[2] + following[2], one[3] + following[3]


class RankSpans:
    """Spans of one rank, by activity.

    Threads:
        Each activity has one thread that adds: the rank's worker, or its prefetch thread (transfer). Any may
        read.
    """

    __slots__ = ("_tracks",)

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._tracks = {activity: Rows(4, capacity, merged) for activity in ORDER}

    def add(self, activity: Activity, start_s: float, end_s: float, count: int = 1) -> None:
        """Add a span, in seconds by `perf_counter`."""
        self._tracks[activity].add((start_s, end_s, end_s - start_s, count))

    def read(self, activity: Activity) -> Matrix:
        """Rows of (start, end, busy, count), in seconds, in the order in which they ended. Shape (n, 4)."""
        return self._tracks[activity].read()
