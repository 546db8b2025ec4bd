import math

import pytest

from flowdp.policy.drift import DivergenceGuard, GuardAction

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
    assert DivergenceGuard(enabled=False).report((9.0,)).action is STABLE
