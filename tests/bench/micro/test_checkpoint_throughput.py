"""The arithmetic of the bench, on made-up times of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.micro.checkpoint_throughput import MARGIN_S, Losses, Pace, losses, share

STEP_S = 0.01


def paced(slow: Sequence[tuple[float, float]], end: float = 10.0) -> Pace:
    """Two devices with a step of 8 samples each 10 ms, but half as fast in the given spans."""
    marks, now = [], 0.0
    while now < end:
        marks.append((now, 8))
        now += STEP_S * (2 if any(a <= now < b for a, b in slow) else 1)
    return Pace([marks, [(time + 0.003, samples) for time, samples in marks]])


def test_a_file_loses_the_time_in_which_steps_were_slower() -> None:
    files = [(2.0, 2.2), (5.0, 5.4), (8.0, 8.2)]
    times = losses(20, paced(files), files, (1.0, 10.0))
    assert times.lost_ms == pytest.approx((100, 200, 100), abs=2 * STEP_S * 1e3)
    assert times.idle_ms == pytest.approx((0, 0), abs=STEP_S * 1e3)
    assert times.apart_ms == pytest.approx((3000, 3000))
    assert share([times]) == pytest.approx(0.4 / 3 / 3, rel=0.2)


def test_devices_that_stand_still_lose_all_of_it() -> None:
    before = [(step * STEP_S, 8) for step in range(300)]
    behind = [(3.5 + step * STEP_S, 8) for step in range(300)]
    times = losses(1, Pace([before + behind]), [(3.0, 3.5)], (0.0, 6.0))
    assert times.lost_ms == pytest.approx((500,), abs=2 * STEP_S * 1e3)


def test_a_pace_that_changes_for_good_is_not_charged_to_the_file() -> None:
    file = (3.0, 3.2)
    times = losses(1, paced([(sum(file) / 2, 10.0)]), [file], (0.0, 6.0))
    (lost,) = times.lost_ms
    assert abs(lost) < 0.15 * (file[1] - file[0] + 2 * MARGIN_S) * 1e3


def test_a_file_without_free_sides_is_left_out_and_those_beside_it_do_not_reach_into_it() -> None:
    at_the_beginning, near_the_next, crowded = (1.1, 1.2), (4.0, 4.2), (4.4, 4.6)
    files = [at_the_beginning, (2.5, 2.7), near_the_next, crowded]
    times = losses(1, paced(files), files, (1.0, 8.0))
    assert times.lost_ms == pytest.approx((100,), abs=2 * STEP_S * 1e3)
    assert times.apart_ms == pytest.approx((1400, 1500, 400))


def test_the_file_from_before_the_measured_time_counts_for_nothing() -> None:
    files = [(0.1, 0.3), (3.0, 3.2)]
    times = losses(1, paced(files), files, (1.0, 6.0))
    assert len(times.lost_ms) == 1
    assert (times.idle_ms, times.apart_ms) == ((), ())


def test_cost_is_known_with_a_loss_and_a_distance_of_any_run() -> None:
    lost, apart = Losses(1, (30.0, 30.0, 90.0), (), ()), Losses(1, (), (), (500.0, 500.0, 2000.0))
    assert share([lost, apart]) == pytest.approx(0.05)
    assert share([lost]) is None
    assert share([apart]) is None
