"""Tests of the size of a worker's pool: it follows the step times."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flowdp.policy.pool_size import BLOCK_MS, PAUSE_MS, PoolSize

Cost = Callable[[int], float]  # milliseconds of a step with this number of threads


def large(size: int) -> float:
    """Twice the threads take nearly half the time."""
    return 20.0 * (0.1 + 0.9 / size)


def small(size: int) -> float:
    """Distributing the work costs more than computing it."""
    return 0.4 + 0.3 * (size - 1)


def crowded(size: int) -> float:
    """Other programs use the cores, and threads spin waiting for those without one."""
    return 20.0 if size == 1 else 400.0 * size


def shared(size: int) -> float:
    """Two threads get two hyperthreads of one core."""
    return {1: 10.0, 2: 10.5}.get(size, 36.0 / size)


def work(pool: PoolSize, cost: Cost, ms: float) -> tuple[float, float]:
    """Steps of 32 samples for this time; returns the time, and the fraction that the best size would need."""
    spent, steps = 0.0, 0
    while spent < ms:
        step = cost(pool.size)
        spent += step
        steps += 1
        pool.worked(step, 32)
    return spent, steps * min(cost(1), cost(2), cost(4)) / spent


@pytest.mark.parametrize(("cost", "best"), [(large, 4), (small, 1), (crowded, 1), (shared, 4)])
def test_the_fastest_size_is_found(cost: Cost, best: int) -> None:
    pool = PoolSize(4)
    assert pool.size == 1
    work(pool, cost, 3_000)
    assert pool.size == best


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_sizes_double_up_to_the_budget(budget: int, sizes: list[int]) -> None:
    pool, seen = PoolSize(budget), []
    for _ in range(100):
        if pool.size not in seen:
            seen.append(pool.size)
        pool.worked(600.0 / pool.size, 1)
    assert seen == sizes
    assert pool.size == budget


def test_a_size_without_hope_is_left_after_one_step() -> None:
    pool, seen = PoolSize(4), []
    for _ in range(100):
        seen.append(pool.size)
        pool.worked(crowded(pool.size), 32)
    assert seen.count(2) == 1
    assert 4 not in seen


def test_a_plateau_is_not_climbed() -> None:
    pool = PoolSize(4)
    work(pool, lambda size: 20.0 - 0.2 * size, 3_000)
    assert pool.size == 1


def test_a_pool_whose_machine_becomes_crowded_is_left_at_once() -> None:
    pool = PoolSize(4)
    work(pool, large, 5_000)
    assert pool.size == 4
    steps = 0
    while pool.size != 1:
        pool.worked(crowded(pool.size), 32)
        steps += 1
    assert steps <= 3
    work(pool, crowded, 5_000)
    assert pool.size == 1


def test_one_interruption_changes_nothing() -> None:
    pool = PoolSize(4)
    work(pool, large, 3_000)
    for _ in range(4):
        pool.worked(2_000.0, 32)
        assert pool.size == 4
        for _ in range(20):
            pool.worked(large(4), 32)


def test_the_pool_comes_back_when_the_crowd_has_left() -> None:
    pool = PoolSize(4)
    work(pool, crowded, 60_000)
    assert pool.size == 1
    work(pool, large, 60_000)
    assert pool.size == 4


@pytest.mark.parametrize("cost", [large, small, crowded, shared])
def test_trying_costs_little(cost: Cost) -> None:
    pool = PoolSize(4)
    work(pool, cost, 2_000)
    _, part = work(pool, cost, 600_000)
    assert part > 0.96


def test_a_larger_batch_is_no_slower_step() -> None:
    pool = PoolSize(4)
    work(pool, large, 3_000)
    for _ in range(int(PAUSE_MS / large(4) / 8) - 10):
        pool.worked(5 * large(4), 160)
        assert pool.size == 4


def test_a_step_without_samples_counts_with_those_that_follow() -> None:
    pool = PoolSize(2)
    for _ in range(100):
        pool.worked(BLOCK_MS, 0)
    assert pool.size == 1


@pytest.mark.parametrize("seed", range(5))
def test_preemption_does_not_hide_the_fastest(seed: int) -> None:
    """Most steps with one thread are quick, some wait for a time slice: the sum counts, not the quick
    ones.
    """
    draw = random.Random(seed)

    def cost(size: int) -> float:
        chance = {1: 0.1, 2: 0.6, 4: 0.9}[size]
        return 0.7 / size + (draw.uniform(10, 40) * size if draw.random() < chance else 0.0)

    pool, quick = PoolSize(4), 0
    for _ in range(5_000):
        quick += pool.size == 1
        pool.worked(cost(pool.size), 32)
    assert quick > 0.95 * 5_000
