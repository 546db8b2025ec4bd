from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdp.policy.shares import (
    ThroughputBalance,
    hinted_weights,
    normalised_ratios,
    part_sizes,
)

weights = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=8)


def test_weights_are_those_of_the_hint_else_equal():
    assert hinted_weights(3, (1, 2.3)) == (2.3, 1.0, 2.3)
    assert hinted_weights(2, None) == (1.0, 1.0)


@given(st.integers(0, 60), weights, st.integers(1, 4))
def test_no_share_is_smaller_than_the_least(samples, given_weights, least):
    ratios = normalised_ratios(given_weights, len(given_weights))
    sizes = part_sizes(samples, ratios, least)
    assert sum(sizes) == samples
    if samples >= least:
        assert all(size == 0 or size >= least for size in sizes)
    else:  # too few: one rank has them all, and its output is that of one device
        assert sum(size > 0 for size in sizes) <= 1
    if samples >= least * len(sizes):
        assert min(sizes) >= least


def test_two_samples_at_least():
    assert part_sizes(3, [0.5, 0.5], 2) == (3, 0)
    assert part_sizes(3, [1.0, 30.0], 2) == (0, 3)
    assert part_sizes(31, [1.0, 30.0], 2) == (2, 29)
    assert part_sizes(5, [1.0, 1.0, 1.0], 2) == (3, 2, 0)


@given(st.integers(0, 300), weights)
def test_parts_fill_the_window_and_are_near_their_share(samples, given_weights):
    sizes = part_sizes(samples, given_weights)
    assert sum(sizes) == samples
    assert min(sizes) >= (samples >= len(sizes))
    # No rank loses samples by the rounding of others; one sample each may go to ranks too slow for any.
    whole = sum(given_weights)
    assert all(
        abs(size - samples * weight / whole) <= len(sizes)
        for size, weight in zip(sizes, given_weights, strict=True)
    )


def test_speeds_that_differ_by_noise_give_equal_parts():
    assert part_sizes(32, [0.494, 0.506]) == (16, 16)
    assert part_sizes(32, [0.47, 0.53]) == (15, 17)


@given(st.integers(1, 40), st.floats(0.05, 20.0))
def test_no_other_split_finishes_earlier(samples, speed):
    def longest_ms(sizes):
        return max(sizes[0] / speed, sizes[1])

    sizes = part_sizes(samples, [speed, 1.0])
    others = [(first, samples - first) for first in range(samples + 1)]
    if samples > 1:  # each rank keeps one, to be measured
        others = [pair for pair in others if min(pair) > 0]
    assert longest_ms(sizes) == pytest.approx(min(map(longest_ms, others)))


def test_a_very_slow_rank_keeps_one_sample():
    assert part_sizes(8, [1.0, 1.0, 1e-6]) == (3, 4, 1)
    assert part_sizes(2, [1.0, 1.0, 1e-6]) == (1, 1, 0)


# ---------------------------------------------------------------- the balance of single batches
def run(balance, throughput, steps):
    """Steps with this `throughput` in samples per millisecond; returns the steps that recomputed the
    ratios.
    """
    return [
        step
        for step in range(1, steps + 1)
        if balance.update(
            [1 if rate else 0 for rate in throughput], [1.0 / rate if rate else 0.0 for rate in throughput]
        )
    ]


def test_it_rebalances_after_ten_steps_and_every_fifty():
    assert run(ThroughputBalance([1, 1]), (2.0, 1.0), 160) == [10, 60, 110, 160]


def test_a_slow_rank_keeps_a_twentieth_and_the_others_pay_in_proportion():
    balance = ThroughputBalance([1, 1, 1])
    run(balance, (60.0, 40.0, 0.001), 10)
    assert balance.ratios == pytest.approx((0.6 * 0.95, 0.4 * 0.95, 0.05), rel=1e-3)


@given(st.lists(st.floats(0.01, 1000.0), min_size=2, max_size=8))
def test_recomputed_ratios_sum_to_one_in_the_order_of_speed(throughput):
    balance = ThroughputBalance([1] * len(throughput))
    run(balance, throughput, 10)
    assert sum(balance.ratios) == pytest.approx(1.0)
    assert min(balance.ratios) > 0.03
    ranked = sorted(zip(throughput, balance.ratios, strict=True))
    assert all(slow[1] <= fast[1] + 1e-9 for slow, fast in pairwise(ranked))


def test_a_steady_split_stays_until_a_speed_changes_by_more() -> None:
    balance = ThroughputBalance([0.5, 0.5], calibration=0, interval=1, floor=0.0, steady=0.02)
    balance.update([50, 50], [10.0, 10.3])
    assert balance.ratios == (0.5, 0.5)
    for _ in range(20):
        balance.update([50, 50], [10.0, 12.0])
    assert balance.ratios[0] / balance.ratios[1] == pytest.approx(1.2, rel=0.03)
