"""Tests of rechecks: at growing distances, and at once after a failure."""

from __future__ import annotations

from flowdp.policy.recheck import Recheck, is_due_at


def test_growing_distances() -> None:
    assert [number for number in range(1, 100) if is_due_at(number)] == [1, 2, 4, 8, 16, 32, 64]


def test_what_fails_is_not_counted() -> None:
    recheck, due = Recheck(), []
    for number in range(1, 12):
        if recheck.is_due:
            due.append(number)
        if number not in (2, 3, 4):  # these fail
            recheck.passed()
    assert due == [1, 2, 3, 4, 5, 7, 11]
