"""Tests of rows in bounded memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flowdp.timeline.spans import Rows, merged, thinned
from tests.limits import HANG_S


def filled(count: int, capacity: int = 8) -> Rows:
    rows = Rows(4, capacity, merged)
    for at in range(count):
        rows.add((at, at + 0.5, 0.5, 1))
    return rows


def test_few_rows_stay_as_they_are() -> None:
    assert filled(7).read().tolist() == [[at, at + 0.5, 0.5, 1] for at in range(7)]


@pytest.mark.parametrize("count", [8, 9, 15, 16, 17, 31, 100, 1000, 1001])
def test_many_are_merged_evenly_and_nothing_is_lost(count: int) -> None:
    rows = filled(count).read()
    assert len(rows) <= 8
    assert (rows[:, 3].sum(), rows[:, 2].sum()) == (count, count / 2)
    assert (rows[0, 0], rows[-1, 1]) == (0, count - 0.5)
    assert (rows[1:, 0] > rows[:-1, 1]).all()
    strides = rows[:-1, 3]  # the last one is still open
    assert strides.max(initial=1) == strides.min(initial=strides.max(initial=1))


def test_a_reader_sees_whole_rows_while_they_are_added() -> None:
    rows, faults = Rows(4, 64, merged), list[str]()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen = rows.read()
            if len(seen) and not np.allclose(seen[:, 2] * 2, seen[:, 3]):
                faults.append(str(seen))
                return

    reader = threading.Thread(target=read)
    reader.start()
    for at in range(50_000):
        rows.add((at, at + 0.5, 0.5, 1))
    is_over.set()
    reader.join(HANG_S)
    assert not faults


@pytest.mark.parametrize("count", [0, 1, 5, 6, 1001])
def test_thinning_keeps_the_sums(count: int) -> None:
    rows = np.array([(at, at + 0.5, 0.5, 1) for at in range(count)], dtype=float).reshape(-1, 4)
    few = thinned(rows, 5, merged)
    assert len(few) <= 5
    assert few[:, 3].sum() == count
    if count:
        assert (few[0, 0], few[-1, 1]) == (0, count - 0.5)
