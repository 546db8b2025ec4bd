"""Tests of a run's quotas: probe, measurement, guard, hint and fixed shares."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from flowdp.errors import OptionError
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.drift import GuardAction


def measured(
    cadence: Cadence,
    pace_ms: tuple[float, ...],
    sync_ms: float = 0.0,
    drifts: tuple[float, ...] | None = None,
    steps: tuple[int, ...] | None = None,
) -> str:
    return cadence.measured(pace_ms, steps or cadence.quotas, sync_ms, drifts)


def test_the_first_round_is_a_short_probe() -> None:
    cadence = Cadence(3, CadenceOptions())
    assert not cadence.is_known
    assert cadence.quotas == (3, 3, 3)
    assert cadence.anchor == 10
    assert cadence.round_ms == 0.0
    # Nothing is known: all ranks are equal.
    assert len(set(cadence.ms_per_step)) == 1
    # A smaller anchor is a shorter probe.
    assert Cadence(2, CadenceOptions(anchor=2)).quotas == (2, 2)


def test_after_a_measurement_all_fill_the_same_time() -> None:
    cadence = Cadence(2, CadenceOptions())
    assert measured(cadence, (10.0, 20.0)) == ""
    assert cadence.is_known
    assert cadence.quotas == (20, 10)
    assert cadence.ms_per_step == (10.0, 20.0)
    assert cadence.round_ms == 200.0


def test_a_hint_stands_for_the_first_measurement() -> None:
    cadence = Cadence(2, CadenceOptions(speed_hint=(1, 2.0)))
    assert cadence.is_known
    assert cadence.quotas == (20, 10)
    assert cadence.ms_per_step[1] == pytest.approx(2 * cadence.ms_per_step[0])
    # And has no effect afterwards.
    measured(cadence, (10.0, 10.0))
    assert cadence.quotas == (10, 10)


def test_fixed_shares_are_kept_whatever_is_measured() -> None:
    cadence = Cadence(2, CadenceOptions(), ratios=[0.75, 0.25])
    assert cadence.is_known
    assert cadence.quotas == (30, 10)
    measured(cadence, (50.0, 10.0))
    assert cadence.quotas == (30, 10)
    assert cadence.ratios == (0.75, 0.25)


def test_dear_averaging_makes_rounds_longer() -> None:
    cadence = Cadence(2, CadenceOptions())
    # The probe's averaging is the first one ever: it does not count.
    measured(cadence, (10.0, 10.0), sync_ms=1000.0)
    assert cadence.anchor == 10
    # 100 ms in a round of 100 ms is ten times the target.
    measured(cadence, (10.0, 10.0), sync_ms=100.0)
    assert cadence.anchor == 100
    assert min(cadence.quotas) == 100
    # One long averaging is an outlier, two mean a link that has become slow.
    measured(cadence, (10.0, 10.0), sync_ms=5000.0)
    assert cadence.anchor == 100
    measured(cadence, (10.0, 10.0), sync_ms=5000.0)
    assert cadence.anchor == 200
    assert max(cadence.quotas) == 200


def test_a_short_round_at_the_end_of_an_epoch_makes_no_round_longer() -> None:
    cadence = Cadence(2, CadenceOptions())
    measured(cadence, (20.0, 20.0), sync_ms=4.0)
    for _ in range(4):
        measured(cadence, (20.0, 20.0), sync_ms=4.0)  # 2 % of a round of 10 steps
        measured(cadence, (20.0, 0.0), sync_ms=4.0, steps=(1, 0))  # 20 % of the only step
    assert cadence.anchor == 10


def test_a_limited_lead_limits_the_quotas() -> None:
    cadence = Cadence(2, CadenceOptions(max_batch_diff=3))
    measured(cadence, (10.0, 20.0))
    assert max(cadence.quotas) <= 4
    assert cadence.quotas == (4, 2)


def test_rising_drifts_hold_the_anchor_and_halve_it() -> None:
    cadence = Cadence(2, CadenceOptions())
    # The first round is too short for its drift to say something about that of later ones.
    assert measured(cadence, (10.0, 10.0), drifts=(0.001, 0.0)) == ""
    assert measured(cadence, (10.0, 10.0), drifts=(0.01, 0.0)) == ""
    assert measured(cadence, (10.0, 10.0), drifts=(0.0, 0.02)) == ""
    # Over the threshold: averaging is expensive, but the anchor does not grow.
    reason = measured(cadence, (10.0, 10.0), sync_ms=50.0, drifts=(0.06, 0.0))
    assert "over the threshold" in reason
    assert (cadence.action, cadence.anchor) == (GuardAction.HOLD, 10)
    # Over twice the threshold: halved.
    reason = measured(cadence, (10.0, 10.0), drifts=(0.2, 0.0))
    assert "over twice the threshold" in reason
    assert (cadence.action, cadence.anchor) == (GuardAction.TIGHTEN, 5)
    assert cadence.quotas == (5, 5)
    # Below it again: the anchor comes back.
    assert measured(cadence, (10.0, 10.0), sync_ms=1.0, drifts=(0.1, 0.0)) == ""
    assert cadence.action is GuardAction.STABLE
    measured(cadence, (10.0, 10.0), sync_ms=1.0, drifts=(0.1, 0.0))
    assert cadence.anchor == 6


def test_a_drift_that_is_high_and_noisy_leaves_the_rounds_as_they_are() -> None:
    """Random labels: replicas are always far apart, and no further from round to round."""
    draw = random.Random(1)
    cadence, anchors, reasons = Cadence(2, CadenceOptions()), [], []
    for _ in range(400):
        drift = 0.2 * math.exp(draw.gauss(0.0, 0.2)) * math.sqrt(sum(cadence.quotas) / 20)
        reasons.append(measured(cadence, (10.0, 10.0), sync_ms=1.0, drifts=(drift, 0.0)))
        anchors.append(cadence.anchor)
    assert sum(map(bool, reasons)) <= 8
    assert fmean(anchors) >= 9.5


def test_it_begins_with_what_another_run_had_found_out() -> None:
    cadence = Cadence(2, CadenceOptions(max_anchor=30))
    cadence.restore(20, (5.0, 10.0))
    assert cadence.is_known
    assert (cadence.anchor, cadence.quotas) == (20, (40, 20))
    cadence.restore(50, (5.0, 10.0))
    assert cadence.anchor == 30
    nothing = Cadence(2, CadenceOptions())
    nothing.restore(20, (0.0, 0.0))
    assert not nothing.is_known
    with pytest.raises(OptionError):
        cadence.restore(20, (5.0,))


def test_a_rank_that_is_gone_has_no_quota_and_holds_nobody_up() -> None:
    cadence = Cadence(3, CadenceOptions(anchor=10))
    measured(cadence, (10.0, 10.0, 100.0))
    assert cadence.round_ms >= 1000.0
    cadence.leave(2)
    assert cadence.quotas[2] == 0
    assert cadence.round_ms <= 150.0
    measured(cadence, (10.0, 20.0, 0.0), steps=(10, 10, 0))
    assert cadence.quotas[2] == 0
    assert cadence.quotas[0] > cadence.quotas[1] > 0


# ---------------------------------------------------------------- outliers
def test_slow_first_steps_are_forgotten_in_a_few_rounds() -> None:
    """The first steps of a process load code and allocate: here they took a third longer."""
    cadence = Cadence(2, CadenceOptions())
    measured(cadence, (5.3, 16.6))
    for _ in range(3):
        measured(cadence, (4.5, 16.6))
    assert cadence.ms_per_step[0] == pytest.approx(4.5, rel=0.01)
    walls = [quota * ms for quota, ms in zip(cadence.quotas, (4.5, 16.6), strict=True)]
    assert max(walls) - min(walls) < 0.03 * max(walls)


def test_one_long_step_changes_nothing() -> None:
    cadence = Cadence(2, CadenceOptions())
    measured(cadence, (20.0, 20.0))
    before = cadence.quotas
    measured(cadence, (20.0, 2000.0), steps=(10, 1))
    assert cadence.el_che.ms_per_batch == (20.0, 20.0)
    assert cadence.quotas == before
    # The next measurement agrees with the earlier ones: the long step is forgotten, and so is another one.
    measured(cadence, (20.0, 20.0))
    measured(cadence, (20.0, 2000.0), steps=(10, 1))
    assert cadence.quotas == before


def test_a_rank_that_has_become_slow_is_believed_the_second_time() -> None:
    cadence = Cadence(2, CadenceOptions())
    measured(cadence, (20.0, 20.0))
    measured(cadence, (20.0, 2000.0), steps=(10, 1))
    measured(cadence, (20.0, 200.0), steps=(10, 1))
    assert cadence.el_che.ms_per_batch == (20.0, 200.0)  # at once, and the closer of both
    assert cadence.quotas[0] == 10 * cadence.quotas[1]
    # When it is fast again over several steps, this counts at once, too.
    measured(cadence, (20.0, 20.0))
    assert cadence.el_che.ms_per_batch == (20.0, 20.0)


def test_an_epochs_short_last_batch_makes_no_rank_fast() -> None:
    cadence = Cadence(2, CadenceOptions())
    measured(cadence, (20.0, 20.0))
    measured(cadence, (0.3, 20.0), steps=(1, 1))
    assert cadence.el_che.ms_per_batch == (20.0, 20.0)


def test_a_pace_of_a_checkpoint_is_tried_before_it_is_believed() -> None:
    cadence = Cadence(2, CadenceOptions())
    cadence.restore(10, (20.0, 1e7))  # the other run had been stopped in a debugger
    assert cadence.due == (0, 1)
    measured(cadence, (20.0, 20.0), steps=(9, 1))
    measured(cadence, (20.0, 20.0), steps=(9, 1))
    assert cadence.el_che.ms_per_batch == (20.0, 20.0)
    assert cadence.due == ()


def test_fixed_shares_and_ranks_that_left_are_not_probed() -> None:
    fixed = Cadence(2, CadenceOptions(), ratios=[0.9, 0.1])
    measured(fixed, (10.0, 0.0), steps=(10, 0))
    assert fixed.due == ()
    cadence = Cadence(3, CadenceOptions())
    measured(cadence, (10.0, 10.0, 10.0))
    cadence.leave(2)
    measured(cadence, (10.0, 0.0, 0.0), steps=(10, 0, 0))
    assert cadence.due == (1,)


def test_a_guard_that_is_switched_off_sees_nothing() -> None:
    cadence = Cadence(2, CadenceOptions(anchor=8, divergence_guard=False))
    assert measured(cadence, (1.0, 1.0), drifts=(math.nan, 9.0)) == ""
    assert (cadence.action, cadence.anchor, cadence.guard.history) == (GuardAction.STABLE, 8, ())
