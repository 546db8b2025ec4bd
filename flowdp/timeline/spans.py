"""Spans of a rank, from when to when it did something, in bounded memory for runs of any length.

When the memory is full, neighbours are merged two by two, and from then on as many rows that are added make
one. So a run is there from its beginning to its end, in the same detail everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowdp.policy.efficiency import Activity

__all__ = ["CAPACITY", "ORDER", "Matrix", "Merge", "RankSpans", "Rows", "Span", "merged", "taken", "thinned"]

CAPACITY = 16_384
"""Spans that are kept of each activity of a rank: 0.5 MB."""

Matrix = NDArray[np.float64]

Merge = Callable[[Any, Any], tuple[Any, ...]]
"""Makes one row of a row and its next; of two tables, by columns, one. It is associative."""

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


# ---------------------------------------------------------------- rows
class Rows:
    """Rows of the same width.

    Args:
        width: Numbers of a row.
        capacity: Most rows; even.
        merge: Makes one row of two.

    Threads:
        One adds; any may read.
    """

    __slots__ = ("_kept", "_limit", "_merge", "_open", "_stride", "_width")

    def __init__(self, width: int, capacity: int, merge: Merge) -> None:
        self._width = width
        self._limit = width * capacity
        self._merge = merge
        self._kept = array("d")
        self._stride = 1  # rows that make one
        self._open: tuple[int, tuple[float, ...]] | None = None  # how many so far, and the row of them

    def add(self, row: tuple[float, ...]) -> None:
        """Append a row."""
        if self._stride > 1:
            count, so_far = (0, row) if self._open is None else self._open
            whole = row if not count else self._merge(so_far, row)
            if count + 1 < self._stride:
                self._open = count + 1, whole
                return
            self._open, row = None, whole
        self._kept.extend(row)
        if len(self._kept) >= self._limit:
            self._halve()

    def read(self) -> Matrix:
        """A copy of the rows, those added by now. Shape (rows, width)."""
        kept, last = self._kept[:], self._open  # one operation each: a row is there as a whole, or not at all
        if last is not None:
            kept.extend(last[1])
        return _matrix(kept, self._width)

    def _halve(self) -> None:
        rows = _matrix(self._kept, self._width)
        merged = np.stack(self._merge(rows[0::2].T, rows[1::2].T), axis=1)
        self._kept = array("d", merged.tobytes())  # a reader goes on with the one that it has
        self._stride *= 2


def _matrix(numbers: array[float], width: int) -> Matrix:
    return np.array(numbers, dtype=np.float64).reshape(-1, width)


def taken(rows: Matrix, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fractions of the time between neighbouring edges that spans take, merged ones by their busy time.

    Args:
        rows: (start, end, busy, count), in their order. Shape (n, 4).
        edges: Points in time, rising. Shape (m + 1,).

    Returns:
        Shape (m,).
    """
    until = np.cumsum(rows[:, 2])
    bounds = np.stack((until - rows[:, 2], until), axis=1)
    return np.diff(np.interp(edges, rows[:, :2].ravel(), bounds.ravel())) / np.diff(edges)


def thinned(rows: Matrix, limit: int, merge: Merge) -> Matrix:
    """Merge neighbours until there are so many rows at most. Shape (rows, width)."""
    while len(rows) > limit:
        pairs = np.stack(merge(rows[0 : len(rows) - 1 : 2].T, rows[1::2].T), axis=1)
        rows = np.concatenate((pairs, rows[-1:])) if len(rows) % 2 else pairs
    return rows
