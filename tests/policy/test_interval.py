"""Tests of the budget of checkpoints."""

from __future__ import annotations

import math

import pytest

from flowdp.policy.interval import SHARE, SaveBudget, SaveCost


def test_the_first_checkpoint_is_free_and_none_begins_while_one_is_written() -> None:
    budget = SaveBudget()
    assert budget.free_ms == -math.inf
    budget.saved(0.0, 10.0)
    assert (budget.free_ms, budget.cost) == (math.inf, None)
    budget.written(20.0)
    assert budget.cost == SaveCost(10.0, 10.0)
    assert budget.free_ms == pytest.approx(20.0 / SHARE)


def test_two_captures_before_a_file_are_one_checkpoint() -> None:
    budget = SaveBudget()
    budget.saved(0.0, 10.0)
    budget.saved(50.0, 60.0)
    budget.written(100.0)
    assert budget.cost == SaveCost(20.0, 40.0)
    assert budget.free_ms == pytest.approx(60.0 / SHARE)


def test_a_run_that_saves_whenever_it_may_loses_its_share_of_the_time_behind_the_first_at_most() -> None:
    """Also where all of a writing is lost."""
    budget, now_ms, lost_ms = SaveBudget(), 0.0, 0.0
    for _ in range(20):
        assert lost_ms <= SHARE * now_ms + 1e-6
        budget.saved(now_ms, now_ms + 30.0)
        budget.written(now_ms + 100.0)
        lost_ms += 100.0
        now_ms = budget.free_ms
