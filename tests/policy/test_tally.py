"""Tests of sums of an epoch's work, and of metrics with several elements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.tally import MetricArray, Tally, Work, evaluation_means, pace_ms


def work(samples, loss=0.0, *, steps=1, **fields):
    return Work(epoch=2, steps=steps, samples=samples, losses=(loss * samples, samples), **fields)


def result(tally, epoch_ms=1000.0):
    return tally.result(epoch_ms, anchor=10, global_step=7, epochs=10)


@pytest.fixture
def metrics():
    tally = Tally(2, 2)
    tally.add(0, work(600, 0.5, steps=6, busy_ms=800.0, data_ms=5.0, lr=0.1, wait_ms=50.0, sync_ms=20.0))
    tally.add(1, work(300, 0.8, steps=3, busy_ms=700.0, scalars={"accuracy": (240.0, 300.0)}, lr=0.2))
    tally.add(
        0,
        work(100, 0.1, busy_ms=150.0, data_ms=1.0, scalars={"accuracy": (50.0, 100.0)}, lr=0.3, wait_ms=10.0),
    )
    tally.close_round(4.0, None)
    tally.close_round(15.0, 0.02, rounds=5)
    tally.close_round(3.0, 0.01)
    return result(tally, 2000.0)


def test_an_epoch_is_the_sum_of_its_work(metrics):
    assert (metrics.epoch, metrics.epochs, metrics.anchor, metrics.global_step) == (2, 10, 10, 7)
    assert metrics.loss == pytest.approx((300 + 240 + 10) / 1000)
    assert metrics.scalars == {"accuracy": pytest.approx(290 / 400)}
    assert metrics.share == (0.7, 0.3)
    assert metrics.throughput == (350.0, 150.0)
    assert metrics.efficiency == pytest.approx((950 + 700) / 4000)
    assert (metrics.rounds, metrics.sync_ms, metrics.divergence) == (7, 22.0, 0.02)
    assert metrics.lr == 0.3
    assert metrics.eval == {}


def test_each_rank_has_its_own_part(metrics):
    first, second = metrics.per_rank
    assert (first.samples, first.steps, first.busy_ms, first.data_wait_ms) == (700, 7, 950.0, 6.0)
    assert (first.wait_ms, first.sync_ms, first.lr) == (60.0, 20.0, 0.3)
    assert first.loss == pytest.approx(310 / 700)
    assert first.scalars == {"accuracy": 0.5}
    assert (second.loss, second.scalars) == (pytest.approx(0.8), {"accuracy": 0.8})


def test_a_share_of_nothing_has_a_word():
    tally = Tally(0, 3)
    tally.add(0, Work(0, 1, 800, 1.0))
    tally.add(1, Work(0, 1, 200, 1.0))
    assert "| share 80 % 20 %  0 % (left out) |" in str(result(tally))


def test_an_epoch_without_work_has_no_loss_and_divides_by_nothing():
    empty = result(Tally(0, 2), 0.0)
    assert empty.loss is None
    assert empty == result(Tally(0, 2), 0.0)
    assert "loss" not in str(empty)
    assert (empty.share, empty.throughput, empty.efficiency, empty.lr) == ((0.0, 0.0), (0.0, 0.0), 0.0, 0.0)
    assert (empty.rounds, empty.divergence, empty.scalars) == (0, None, {})


def test_a_nan_loss_stays_a_nan():
    tally = Tally(0, 2)
    tally.add(0, work(10, math.nan))
    tally.add(1, work(10, 1.0))
    metrics = result(tally)
    assert math.isnan(metrics.loss)
    assert math.isnan(metrics.per_rank[0].loss)
    assert metrics.per_rank[1].loss == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 64), st.floats(0.0, 10.0)), min_size=1, max_size=30)
)
def test_the_loss_does_not_depend_on_who_trained_what(parts):
    dealt, alone = Tally(0, 3), Tally(0, 1)
    for rank, samples, loss in parts:
        dealt.add(rank, work(samples, loss))
        alone.add(0, work(samples, loss))
    assert result(dealt).loss == pytest.approx(result(alone).loss)
    assert sum(result(dealt).share) == pytest.approx(1.0)
    assert sum(result(dealt).throughput) == pytest.approx(sum(result(alone).throughput))


def test_the_pace_leaves_the_longest_step_out():
    assert pace_ms(0.0, 0.0, 0) == 0.0
    assert pace_ms(7.0, 7.0, 1) == 7.0
    # A first step of 100 ms, then three of 10.
    assert pace_ms(130.0, 100.0, 4) == 10.0


def test_sums_of_another_run_count_on():
    whole, first, second = Tally(2, 2), Tally(2, 2), Tally(2, 2)
    parts = [
        work(600, 0.5, busy_ms=8.0, scalars={"a": (1.0, 2.0)}, lr=0.1),
        work(300, 0.8, data_ms=1.0, lr=0.2),
    ]
    for part, tally in zip(parts, (first, second), strict=True):
        whole.add(0, part)
        tally.add(0, part)
    second.add(0, first.ranks[0])
    metrics = result(second)
    assert metrics.loss == pytest.approx(result(whole).loss)
    assert replace(metrics, loss=0.0).per_rank[0].samples == 900
    assert metrics.scalars == result(whole).scalars
    assert metrics.per_rank[0].busy_ms == 8.0


def test_an_evaluation_is_the_same_whoever_evaluated_which_batch():
    results = [(number, 1 + number % 3, (("score", 0.1 * number),)) for number in range(20)]
    mean = evaluation_means(results)
    assert mean["score"] == pytest.approx(
        sum(n * v for _, n, ((_, v),) in results) / sum(r[1] for r in results)
    )
    assert evaluation_means(results[::-1]) == mean
    assert evaluation_means([]) == {}


def test_a_name_that_some_batches_lack_is_the_mean_over_the_others():
    means = evaluation_means([(0, 2, (("a", 1.0),)), (1, 6, (("a", 2.0), ("b", 3.0)))])
    assert means == {"a": 1.75, "b": 3.0}


def test_norms_of_gradients_are_summed_over_orders_and_ranks() -> None:
    tally = Tally(0, 2)
    tally.add(0, Work(0, 2, 8, norms=(3.0, 2.0, 2)))
    tally.add(0, Work(0, 1, 4, norms=(5.0, 5.0, 1)))
    tally.add(1, Work(0, 1, 4))
    result = tally.result(1.0, 1, 4, None)
    assert (result.grad_norm, result.grad_norm_max) == (8.0 / 3, 5.0)
    nothing = Tally(0, 1).result(1.0, 1, 0, None)
    assert (nothing.grad_norm, nothing.grad_norm_max) == (None, None)


@pytest.mark.parametrize(
    ("shape", "values", "nested"),
    [
        ((3,), (1.0, 2.0, 3.0), [1.0, 2.0, 3.0]),
        ((2, 3), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        ((2, 1, 2), (1.0, 2.0, 3.0, 4.0), [[[1.0, 2.0]], [[3.0, 4.0]]]),
        ((0,), (), []),
        ((0, 2), (), []),
    ],
)
def test_nested_lists(shape: tuple[int, ...], values: tuple[float, ...], nested: object) -> None:
    assert MetricArray(shape, values).tolist() == nested


def test_it_prints_its_shape_alone() -> None:
    assert repr(MetricArray((10, 10), (0.0,) * 100)) == "<MetricArray 10 x 10>"
