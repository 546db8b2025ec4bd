"""Tests of the budget of checkpoints."""

from __future__ import annotations

import math

import pytest

from flowdp.policy.save_budget import AIM, SHARE, SaveBudget, SaveCost


def train(budget: SaveBudget, begin_ms: float, end_ms: float, step_ms: float) -> None:
    """Rounds of 100 ms."""
    rounds = round((end_ms - begin_ms) / 100)
    for number in range(1, rounds + 1):
        budget.trained(begin_ms + 100.0 * number, 100.0, round(100 / step_ms))


def test_the_first_checkpoint_is_free_and_none_begins_while_one_is_written() -> None:
    budget = SaveBudget()
    assert budget.free_ms == -math.inf
    budget.saved(0.0, 10.0)
    assert (budget.free_ms, budget.cost) == (math.inf, None)
    budget.written(20.0)
    assert budget.free_ms == pytest.approx(20.0 / AIM)  # nothing is known of the rounds: all may be lost


def test_the_cost_is_the_standstill_and_the_slower_rounds() -> None:
    budget = SaveBudget()
    train(budget, 0.0, 1000.0, 5.0)
    budget.saved(1000.0, 1100.0)
    train(budget, 1100.0, 1600.0, 10.0)
    budget.written(1600.0)
    train(budget, 1600.0, 2600.0, 5.0)
    assert budget.cost == SaveCost(100.0, pytest.approx(250.0), 500.0)
    assert budget.free_ms == pytest.approx(1000.0 + 350.0 / AIM)
    assert budget.step_ms == pytest.approx(5.0)


def test_a_writing_that_slows_nothing_puts_nothing_off() -> None:
    budget = SaveBudget()
    train(budget, 0.0, 4000.0, 5.0)
    budget.saved(4000.0, 4000.0)
    train(budget, 4000.0, 6000.0, 5.0)
    budget.written(6000.0)
    train(budget, 6000.0, 6200.0, 5.0)
    assert budget.free_ms == pytest.approx(4000.0)


def test_too_little_undisturbed_training_is_no_evidence() -> None:
    budget = SaveBudget()
    budget.saved(0.0, 0.0)
    train(budget, 0.0, 2000.0, 5.0)
    budget.written(2000.0)
    train(budget, 2000.0, 3000.0, 5.0)
    assert budget.wait_ms == pytest.approx(2000.0 / AIM)
    train(budget, 3000.0, 3200.0, 5.0)
    assert budget.wait_ms == pytest.approx(0.0)


def test_a_hiccup_puts_off_four_times_as_long_and_counts_when_it_is_confirmed() -> None:
    budget = SaveBudget()
    begin_ms, waits = 0.0, []
    for write_ms in (10.0, 1000.0, 1000.0):
        budget.saved(begin_ms, begin_ms)
        budget.written(begin_ms + write_ms)
        waits.append(budget.wait_ms * AIM)
        begin_ms += 10_000.0
    assert waits == pytest.approx([10.0, 40.0, 1000.0])


def test_two_captures_before_a_file_are_one_checkpoint() -> None:
    budget = SaveBudget()
    budget.saved(0.0, 10.0)
    budget.saved(50.0, 60.0)
    budget.written(100.0)
    assert budget.cost == SaveCost(20.0, 40.0, 40.0)
    assert budget.free_ms == pytest.approx(60.0 / AIM)


def test_records_without_a_time_do_not_count() -> None:
    budget = SaveBudget()
    budget.trained(5.0, 0.0, 3)
    budget.trained(10.0, math.nan, 3)
    budget.saved(10.0, 10.0)
    assert budget.step_ms == 0.0


def test_the_first_round_is_slow_and_no_evidence() -> None:
    budget = SaveBudget()
    budget.trained(1000.0, 1000.0, 1)
    train(budget, 1000.0, 2000.0, 5.0)
    assert budget.step_ms == pytest.approx(5.0)


def test_a_run_that_saves_whenever_it_may_never_loses_more_than_its_share_once_the_first_is_paid_for() -> (
    None
):
    """Also where all of a writing is lost: the first is free, and the second not before both are paid for."""
    budget, now_ms, lost_ms = SaveBudget(), 0.0, 0.0
    for _ in range(20):
        budget.saved(now_ms, now_ms + 30.0)
        budget.written(now_ms + 100.0)
        lost_ms += 100.0
        assert now_ms == 0.0 or lost_ms <= SHARE * (now_ms + 100.0)
        now_ms = budget.free_ms


def test_one_that_seems_to_cost_nothing_is_followed_by_no_burst() -> None:
    budget = SaveBudget()
    train(budget, 0.0, 4000.0, 5.0)
    at, waits = 4000.0, []
    for lost in (True, False, False, False):
        budget.saved(at, at + 100.0 * lost)
        budget.written(at + 100.0)
        train(budget, at + 100.0, at + 8000.0, 5.0)
        waits.append(budget.wait_ms)
        at += 8000.0
    assert waits == pytest.approx([100.0 / AIM, 50.0 / AIM, 25.0 / AIM, 12.5 / AIM])
