"""Tests of what follows from a step's number; a check that failed is due at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.schedule import Recheck, is_due_at, lr_factor, position, warm_up_factor

quotas = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def test_one_device_visits_every_position():
    assert [position(100, i, 7, 7) for i in range(7)] == list(range(100, 107))


@given(quotas, st.integers(0, 10**6))
def test_every_rank_spreads_its_steps_over_the_whole_round(given_quotas, start):
    steps = sum(given_quotas)
    for quota in given_quotas:
        places = [position(start, i, steps, quota) - start for i in range(quota)]
        assert places[0] == 0
        assert all(i * steps / quota - 1 < place <= i * steps / quota for i, place in enumerate(places))


def test_a_milestone_falls_at_the_same_part_of_the_work_on_any_devices():
    # Milestone at step 60 of 120: half of every rank's steps come before it.
    for given_quotas in ([120], [60, 60], [80, 40], [15] * 8):
        for quota in given_quotas:
            before = sum(position(0, i, 120, quota) < 60 for i in range(quota))
            assert before == quota / 2 if quota % 2 == 0 else (quota + 1) / 2


@pytest.mark.parametrize(
    ("ratio", "world_size", "factor"),
    [
        (0.0, 8, 1.0),
        (1.0, 8, 8.0),
        (0.5, 3, 2.0),
        (1.0, 1, 1.0),
        ("linear", 8, 8.0),
        ("sqrt", 9, 3.0),
        ("sqrt", 1, 1.0),
    ],
)
def test_lr_factor(ratio, world_size, factor):
    assert lr_factor(ratio, world_size) == factor


def test_a_warm_up_is_a_straight_line_to_one():
    assert [warm_up_factor(i, 4) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warm_up_factor(0, 0) == 1.0


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
