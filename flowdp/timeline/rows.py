"""Rows of numbers in bounded memory, for runs of any length.

When the memory is full, neighbours are merged two by two, and from then on as many rows that are added make
one. So a run is there from its beginning to its end, in the same detail everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Matrix", "Merge", "Rows", "thinned"]

Matrix = NDArray[np.float64]

Merge = Callable[[Any, Any], tuple[Any, ...]]
"""Makes one row of a row and its next; of two tables, by columns, one. It is associative."""


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


def thinned(rows: Matrix, limit: int, merge: Merge) -> Matrix:
    """Merge neighbours until there are so many rows at most. Shape (rows, width)."""
    while len(rows) > limit:
        pairs = np.stack(merge(rows[0 : len(rows) - 1 : 2].T, rows[1::2].T), axis=1)
        rows = np.concatenate((pairs, rows[-1:])) if len(rows) % 2 else pairs
    return rows
