"""Tests of El Che besides flodl's vectors (tests/vectors)."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.el_che import ElChe, fitted_quotas

paces = st.lists(st.floats(0.05, 500.0), min_size=1, max_size=8)
anchors = st.integers(1, 200)


def calibrated(ms=(10.0, 20.0), anchor=10, **options):
    """A cadence that was given one round of `anchor` steps at these paces, with free averaging."""
    che = ElChe(len(ms), anchor, **options)
    che.report_timing([anchor * pace for pace in ms], [anchor] * len(ms), 0.0)
    return che


# ---------------------------------------------------------------- construction


def test_a_cap_bounds_the_anchor_and_none_never_lowers_it():
    assert ElChe(2, 10, max_anchor=0).anchor == 1
    assert ElChe(2, 300).anchor == 200
    assert (ElChe(2, 300, max_anchor=None).anchor, ElChe(2, 300, max_anchor=None).max_anchor) == (300, 300)
    assert ElChe(2, 10, max_anchor=None).max_anchor == 200


# ---------------------------------------------------------------- measurements


@pytest.mark.parametrize("wall", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_measurement_leaves_the_cadence_as_it_is(wall):
    che = ElChe(2)
    che.report_timing([wall, wall], [10, 10], 5.0)
    assert not che.is_calibrated
    che = calibrated()
    che.report_timing([wall, 400.0], [10, 20], math.nan)
    assert che.ms_per_batch == (10.0, 20.0)
    assert che.batch_counts == (20, 10)


def test_a_rank_without_steps_takes_the_anchor_until_it_is_measured():
    che = ElChe(3, 10)
    che.report_timing([100.0, 0.0, 200.0], [10, 0, 10], 0.0)
    assert che.batch_counts == (20, 10, 10)
    che.report_timing([200.0, 40.0, 200.0], [20, 10, 10], 0.0)
    assert che.ms_per_batch == (10.0, 4.0, 20.0)  # taken as it is: no earlier value to smooth with
    assert che.batch_counts == (20, 50, 10)


def test_a_real_change_of_speed_is_adopted_for_the_most_part_at_once():
    che = calibrated((10.0, 10.0))
    che.report_timing([100.0, 300.0], [10, 10], 0.0)
    assert che.ms_per_batch == (10.0, pytest.approx(26.0))  # a step of 0.8
    assert che.batch_counts == (26, 10)


@pytest.mark.parametrize(
    ("window", "steps", "weight"), [(None, 90, 0.1), (10, 90, 0.8), (10, 5, 1 / 3), (10, 1, 0.1)]
)
def test_with_a_window_a_report_of_many_steps_weighs_more(window, steps, weight):
    che = calibrated(window=window)
    che.report_timing([steps * 10.5, 10 * 20.0], [steps, 10], 0.0)
    assert che.ms_per_batch[0] == pytest.approx(10.0 + weight * 0.5)


def test_the_anchor_decays_by_one_and_never_below_the_first():
    che = calibrated(anchor=10)
    che.report_timing([200.0, 200.0], [20, 10], 100.0)
    assert che.anchor == 50
    che.report_timing([1000.0, 1000.0], [100, 50], 100.0)
    assert che.anchor == 50  # exactly at the target
    che.report_timing([1000.0, 1000.0], [100, 50], 55.0)
    assert che.anchor == 50  # below it, but not below half of it
    seen = []
    for _ in range(45):
        che.report_timing([1000.0, 1000.0], [100, 50], 40.0)
        seen.append((che.anchor, che.batch_counts))
    assert seen[0] == (49, (100, 50))  # the dead zone keeps the counts
    assert (44, (88, 44)) in seen
    assert seen[-1][0] == 10


def test_a_nudge_goes_below_the_first_anchor_and_overhead_brings_it_back():
    che = calibrated()
    che.nudge_anchor_down(0.01)  # clamped to a tenth
    assert (che.anchor, che.batch_counts, che.anchor_wall_ms) == (1, (2, 1), 20.0)
    che.report_timing([20.0, 20.0], [2, 1], 10.0)
    assert che.anchor == 10


def test_a_nudged_anchor_comes_back_step_by_step_while_nothing_holds_it():
    che = calibrated()
    che.nudge_anchor_down(0.5)
    seen = []
    for hold in (False, True, False, False, False, False, False):
        che.report_timing([100.0, 100.0], [10, 5], 1.0, hold=hold)
        seen.append(che.anchor)
    assert seen == [6, 6, 7, 8, 9, 10, 10]


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.integers(0, 400))
def test_a_clamped_total_is_passed_only_by_ranks_that_would_be_empty(speeds, total):
    che = calibrated([60.0 / speed for speed in speeds])
    clamped = che.clamp_total(total)
    whole = che.total_batches
    if total >= whole:
        assert clamped == che.batch_counts
        return
    emptied = sum(count * total < whole for count in che.batch_counts)
    assert total <= sum(clamped) <= total + emptied
    for count, kept in zip(che.batch_counts, clamped, strict=True):
        assert max(1, count * total // whole - 1) <= kept <= count * total // whole + 2


# ---------------------------------------------------------------- planned rounds
def efficiency(ms, quotas):
    times = [quota * pace for quota, pace in zip(quotas, ms, strict=True)]
    return fmean(times) / max(times)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_quotas_of_random_mixes_keep_the_devices_busy(ranks):
    draw = random.Random(ranks)
    mixes = [[draw.uniform(1.0, 4.0) for _ in range(ranks)] for _ in range(1000)]
    assert fmean(efficiency(ms, fitted_quotas(ms, 10)) for ms in mixes) >= 0.98


@given(paces, anchors)
def test_quotas_are_near_the_time_of_the_slowest(ms, anchor):
    quotas = fitted_quotas(ms, anchor)
    slowest = quotas[ms.index(max(ms))]
    assert anchor <= slowest <= max(math.ceil(1.25 * anchor), anchor + 2)
    for quota, pace in zip(quotas, ms, strict=True):
        assert quota >= 1
        assert abs(quota * pace - slowest * max(ms)) <= 0.51 * pace


@given(paces, anchors, st.integers(0, 250))
def test_no_quota_leads_by_more_than_asked(ms, anchor, max_lead):
    quotas = fitted_quotas(ms, anchor, max_lead=max_lead)
    assert all(1 <= quota <= max_lead + 1 for quota in quotas)
    free = fitted_quotas(ms, anchor)
    if max(free) <= max_lead + 1:
        assert sum(quotas) >= sum(free) * 0.79  # not more than with another anchor


def test_a_small_anchor_is_left_where_whole_steps_cost_more_than_three_percent():
    # Steps of 4, 4, 8 and 16 ms with 0.6 ms or more around each: 3.5 to one of the slowest.
    ms = [4.7, 4.7, 8.7, 16.6]
    assert efficiency(ms, (4, 4, 2, 1)) < 0.96
    assert fitted_quotas(ms, 1) == (11, 11, 6, 3)
    assert efficiency(ms, (11, 11, 6, 3)) > 0.97
    # Whole steps fit, or no more is allowed.
    assert fitted_quotas([4.0, 4.0, 8.0, 16.0], 1) == (4, 4, 2, 1)
    assert fitted_quotas(ms, 1, max_anchor=1) == (4, 4, 2, 1)


@pytest.mark.parametrize(
    ("ms", "max_lead", "quotas"),
    [
        ([1.0, 4.0], 0, (1, 1)),
        ([1.0, 4.0], 2, (3, 1)),  # with an anchor of 1 this would be 4 steps: cut
        ([1.0, 4.0], 3, (4, 1)),
        ([1.0, 4.0], 8, (8, 2)),
        ([1.0, 1.0], 4, (5, 5)),
        ([1.0, 4.0], 39, (40, 10)),  # the limit is just wide enough
    ],
)
def test_a_lead_limit_shrinks_the_anchor_first(ms, max_lead, quotas):
    assert fitted_quotas(ms, 10, max_lead=max_lead) == quotas


def test_a_largest_anchor_is_never_passed():
    ms = [1.0, 2.3, 4.0]
    assert fitted_quotas(ms, 10)[2] == 11  # a better rounding than at 10
    assert fitted_quotas(ms, 10, max_anchor=10) == (40, 17, 10)
