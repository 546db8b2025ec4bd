"""Tests of drifts and their guard, and of leads."""

import itertools
import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.drift import DivergenceGuard, GuardAction, Overshoot, lead_limits

STABLE, HOLD, TIGHTEN = GuardAction.STABLE, GuardAction.HOLD, GuardAction.TIGHTEN


def answers(drifts, **options):
    guard = DivergenceGuard(**options)
    return [guard.report((0.0, drift)).action for drift in drifts]


@pytest.mark.parametrize(
    ("drifts", "expected"),
    [
        ([0.02, 0.03, 0.06], [STABLE, STABLE, HOLD]),
        ([0.02, 0.03, 0.06, 0.05], [STABLE, STABLE, HOLD, STABLE]),
        ([0.02, 0.06, 0.10], [STABLE, STABLE, HOLD]),  # exactly twice is not over it
        ([0.02, 0.06, 0.11], [STABLE, STABLE, TIGHTEN]),
        ([0.02, 0.03, 0.05], [STABLE, STABLE, STABLE]),  # exactly the threshold is not over it
        ([0.06, 0.06, 0.07], [STABLE, STABLE, STABLE]),  # not strictly rising
        ([0.9, 0.8, 0.7], [STABLE, STABLE, STABLE]),
        ([0.06, 0.07, 0.08, 0.09, 0.2], [STABLE, STABLE, HOLD, HOLD, TIGHTEN]),
    ],
)
def test_three_rises_over_the_threshold(drifts, expected):
    assert answers(drifts) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_drift_that_is_no_number_tightens_at_once_and_is_no_part_of_a_rise(bad):
    assert answers([0.01, bad, 0.2, 0.3, 0.4]) == [STABLE, TIGHTEN, STABLE, STABLE, TIGHTEN]


NOISY = [0.20, 0.24, 0.19, 0.22, 0.18]


@pytest.mark.parametrize(
    ("drifts", "expected"),
    [
        ([0.20, 0.22, 0.25], STABLE),  # three in a row, within the spread of those before
        ([0.20, 0.25, 0.29], STABLE),  # above all of them, by less than their spread
        ([0.22, 0.26, 0.31], TIGHTEN),
    ],
)
def test_a_rise_leaves_the_noise_of_the_rounds_before_behind(drifts, expected):
    assert answers(NOISY + drifts)[-1] is expected


def test_noise_is_seldom_a_rise_and_a_rise_is_soon_seen_in_it():
    draw = random.Random(0)
    false, delays = 0, []
    for _ in range(100):
        guard = DivergenceGuard()
        for _ in range(50):
            false += guard.report((0.1 * math.exp(draw.gauss(0.0, 0.1)),)).action is not STABLE
        drifts = (0.1 * math.exp(draw.gauss(0.0, 0.1)) * 1.3**at for at in itertools.count(1))
        delays.append(next(at for at, drift in enumerate(drifts) if guard.report((drift,)).action is TIGHTEN))
    assert false <= 0.02 * 100 * 50  # 16 % of them rise three times in a row
    assert median(delays) <= 2


def actions(*rounds):
    guard = DivergenceGuard()
    return [guard.report((drift,), steps).action for drift, steps in rounds]


def test_a_longer_round_drifts_further_and_a_short_one_says_nothing():
    longer = [(0.10, 20), (0.13, 26), (0.17, 34), (0.22, 44)]
    assert actions(*longer) == [STABLE] * 4
    assert actions(*((drift, 20) for drift, _ in longer))[-1] is TIGHTEN
    # The rest of an epoch is a short round: it hides no rise, and begins none.
    assert actions((0.06, 20), (0.09, 20), (0.04, 4), (0.13, 20)) == [STABLE] * 3 + [TIGHTEN]
    assert actions((0.01, 4), (0.09, 20), (0.13, 20)) == [STABLE] * 3


def test_drifts_of_an_earlier_run_are_those_of_rounds_as_long():
    assert DivergenceGuard(history=(0.06, 0.09)).report((0.13,), 400).action is TIGHTEN


def test_a_request_says_why():
    guard = DivergenceGuard(0.05)
    reasons = [guard.report((drift,)).reason for drift in (0.01, 0.02, 0.03, 0.07, 0.2, math.nan)]
    assert reasons == [
        "",
        "",
        "",
        "the drift rose three times in a row, to 0.07, over the threshold 0.05",
        "the drift rose three times in a row, to 0.2, over twice the threshold 0.05",
        "the drift is nan: a replica has NaN or inf parameters",
    ]


ranks = st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8)


def test_a_rank_without_batches_holds_no_other_back():
    assert lead_limits([9, 0, 5], [True, True, True], 3) == [4, 9, 4]
    assert lead_limits([9, 0, 5], [True, False, True], 3) == [9, 9, 13]
    assert lead_limits([9, 0, 5], [True, False, False], 3) == [None, 13, 13]
    assert lead_limits([9, 0], [False, False], 0) == [None, None]


@given(ranks, st.integers(0, 10))
def test_one_rank_can_always_move(given_ranks, limit):
    steps, movable = zip(*given_ranks, strict=True)
    most = lead_limits(steps, movable, limit)
    free = [
        can and (top is None or taken < top) for can, taken, top in zip(movable, steps, most, strict=True)
    ]
    assert any(free) == any(movable)


@given(st.integers(2, 6), st.integers(0, 5), st.data())
def test_a_lead_stays_within_one_of_the_limit(world_size, limit, data):
    steps = [0] * world_size
    for rank in data.draw(st.lists(st.integers(0, world_size - 1), max_size=60)):
        most = lead_limits(steps, [True] * world_size, limit)[rank]
        assert most is not None
        if steps[rank] < most:
            steps[rank] += 1
        assert max(steps) - min(steps) <= limit + 1


@pytest.mark.parametrize(("batches", "start", "most"), [(10, 2, 3), (250, 2, 5), (400, 4, 8), (10**6, 5, 10)])
def test_overshoot_grows_to_its_cap_and_falls_back_to_its_start(batches, start, most):
    overshoot = Overshoot(batches)
    assert overshoot.value == start
    for _ in range(20):
        overshoot.averaged(GuardAction.STABLE)
    assert overshoot.value == most
    overshoot.averaged(GuardAction.HOLD)
    assert overshoot.value == most
    overshoot.averaged(GuardAction.TIGHTEN)
    assert overshoot.value == start


@pytest.mark.parametrize("limit", [0, 1, 40])
def test_a_limit_of_the_users_is_kept(limit):
    overshoot = Overshoot(1000, limit)
    for action in GuardAction:
        overshoot.averaged(action)
        assert overshoot.value == limit
