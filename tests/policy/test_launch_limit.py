"""Tests of the limit of ranks that launch at once, on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from flowdp.policy.launch_limit import (
    BOUND,
    BOUND_WINDOWS,
    LONGEST_PAUSE_MS,
    PRICE,
    TIMEOUTS,
    Calls,
    LaunchLimit,
    Window,
)

Rate = Callable[[int | None], float]  # steps per second of all ranks with a limit


def convoy(limit: int | None) -> float:
    """Small kernels: ranks that launch at once compete for the lock."""
    return {1: 224.0, 2: 138.0, None: 70.0}[limit]


def two_are_best(limit: int | None) -> float:
    """A forward half in Python: with one rank at a time the lock is often unused."""
    return {1: 150.0, 2: 230.0, None: 160.0}[limit]


def computing(limit: int | None) -> float:
    """A forward that computes without the lock."""
    return {1: 60.0, 2: 85.0, None: 100.0}[limit]


def waiting(limit: int | None) -> float:
    """A loss that waits for its device while it has its turn."""
    return {1: 143.0, None: 350.0}[limit]


def equal(limit: int | None) -> float:
    """A long backward: there is always time for a forward."""
    return 100.0


@dataclass
class Machine:
    """Ranks that train for some time.

    Attributes:
        rate: Steps per second of all ranks.
        ranks: Number of ranks.
        noise: Relative standard deviation of a window's rate.
        forward_ms: Time of a forward without a wait.
        lost: Fraction of a forward in which its thread does not run, with all ranks at once.
        waits: Fraction of it spent on other waits, with a limit.
    """

    rate: Rate
    ranks: int = 4
    noise: float = 0.0
    forward_ms: float = 3.0
    lost: float = 0.8
    waits: float = 0.0
    seed: int = 0
    tried: set[int | None] = field(default_factory=set)
    chosen: list[int | None] = field(default_factory=list)
    searched_ms: float = 0.0
    spent_ms: float = 0.0
    steps: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.policy = LaunchLimit(self.ranks)

    def run(self, ms: float) -> None:
        """Train for this time."""
        end_ms = self.spent_ms + ms
        while self.spent_ms < end_ms:
            self.window()

    def window(self, gap_ms: float = 0.0) -> None:
        """Train for one window, including a barrier."""
        policy = self.policy
        rate = self.rate(policy.limit) * max(0.2, self.chance.gauss(1.0, self.noise))
        ms, steps = 0.0, 0
        while not policy.is_enough(ms, steps):
            steps += 1
            ms += 1e3 / rate
        cpu_ms = self.forward_ms
        if policy.limit is None:
            forward = Calls(steps, cpu_ms / (1.0 - self.lost), cpu_ms)
        else:
            forward = Calls(steps, cpu_ms / (1.0 - self.waits), cpu_ms, place_ms=2 * cpu_ms)
        was_trying = policy.is_trying
        policy.seen(Window(ms + gap_ms, gap_ms or ms / steps, steps, forward, Calls(steps, 0.1, 0.1)))
        self.tried.add(policy.limit)
        if not policy.is_trying:
            self.chosen.append(policy.limit)
        self.searched_ms += ms * was_trying
        self.spent_ms += ms
        self.steps += steps


@pytest.mark.parametrize(("rate", "best"), [(convoy, 1), (two_are_best, 2), (computing, None)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_limit_is_found_within_seconds(
    rate: Rate, best: int | None, noise: float, seed: int
) -> None:
    machine = Machine(rate, noise=noise, seed=seed)
    machine.run(6_000)
    assert not machine.policy.is_trying
    assert machine.policy.limit == best


@pytest.mark.parametrize("rate", [convoy, two_are_best, computing, equal])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_search_costs_little(rate: Rate, noise: float) -> None:
    machine = Machine(rate, noise=noise)
    machine.run(5_000)
    machine.steps = machine.spent_ms = 0.0
    machine.run(600_000)
    assert machine.steps / machine.spent_ms * 1e3 > 0.95 * max(map(rate, (None, 1, 2)))


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    machine = Machine(equal, noise=0.3, seed=seed)
    machine.run(600_000)
    changes = sum(one != other for one, other in pairwise(machine.chosen))
    assert changes <= 6
    assert machine.searched_ms < 0.1 * machine.spent_ms


def test_of_two_ranks_one_or_both_launch() -> None:
    machine = Machine(lambda limit: 150.0 if limit == 1 else 100.0, ranks=2)
    machine.run(6_000)
    assert machine.policy.limit == 1
    assert machine.tried == {None, 1}


def test_long_forwards_are_tried_only_if_they_wait() -> None:
    machine = Machine(lambda limit: 0.1 * computing(limit), forward_ms=100.0, lost=0.05)
    machine.run(60_000)
    assert machine.searched_ms == 0.0
    machine = Machine(lambda limit: 0.1 * convoy(limit), forward_ms=100.0, lost=0.5)
    machine.run(60_000)
    assert machine.policy.limit == 1


def test_a_change_of_the_steps_calls_for_another_search() -> None:
    machine = Machine(convoy)
    machine.run(200_000)  # the next search is minutes away
    assert machine.policy.limit == 1
    machine.rate = lambda limit: 8 * computing(limit)  # a compiled step, for instance
    machine.lost = 0.0
    machine.run(30_000)
    assert machine.policy.limit is None


def test_a_standstill_of_all_ranks_does_not_count() -> None:
    machine = Machine(convoy)
    for number in range(40):
        machine.window(gap_ms=10_000.0 if machine.policy.limit == 1 and number % 2 else 0.0)
    assert machine.policy.limit == 1


def test_searches_become_rare() -> None:
    machine = Machine(equal)
    machine.run(6_000)
    assert set(machine.chosen) == {None}
    machine.run(3 * LONGEST_PAUSE_MS)
    early = machine.searched_ms
    machine.run(3 * LONGEST_PAUSE_MS)
    assert 0 < machine.searched_ms - early < 0.5 * early


def test_an_expensive_search_is_rare_from_the_start() -> None:
    machine = Machine(convoy)
    while not machine.policy.is_trying:
        machine.window()
    machine.spent_ms = machine.steps = 0.0
    while machine.policy.is_trying:
        machine.window()
    cost_ms = machine.spent_ms - machine.steps / convoy(1) * 1e3
    assert cost_ms > 500
    machine.searched_ms = 0.0
    machine.run(0.8 * PRICE * cost_ms)
    assert machine.searched_ms == 0.0


def test_a_given_up_wait_ends_the_limit_and_some_end_the_search_for_good() -> None:
    machine = Machine(convoy)
    for _ in range(TIMEOUTS):
        machine.run(200_000)
        assert machine.policy.limit == 1
        machine.policy.gave_up()
        assert machine.policy.limit is None
        assert not machine.policy.is_trying
    machine.searched_ms = 0.0
    machine.run(2 * LONGEST_PAUSE_MS)
    assert machine.policy.limit is None
    assert machine.searched_ms == 0.0


def test_ranks_that_leave_are_counted_out() -> None:
    machine = Machine(convoy, ranks=3)
    machine.run(6_000)
    machine.policy.left()
    assert machine.policy.is_trying  # other ranks need another limit
    machine.run(6_000)
    assert machine.policy.limit == 1
    machine.policy.left()
    assert machine.policy.limit is None
    assert machine.policy.waiting is None
    machine.run(60_000)
    assert machine.policy.limit is None
    assert not machine.policy.is_trying


def test_an_optimizer_in_python_is_launched_under_the_limit_too() -> None:
    for step_ms, covers in ((0.1, False), (2.0, True)):
        policy = LaunchLimit(4)
        for _ in range(3):
            policy.seen(Window(300.0, 5.0, 64, Calls(64, 12.0, 3.0), Calls(64, step_ms * 4, step_ms)))
        assert policy.is_trying
        assert policy.covers_step is covers


def test_a_run_is_launch_bound_when_its_ranks_wait_for_a_while() -> None:
    machine = Machine(convoy)
    machine.run(20_000)
    assert machine.policy.waiting is not None
    assert machine.policy.waiting > BOUND
    assert machine.policy.is_bound
    machine = Machine(equal, lost=0.0)
    machine.run(20_000)
    assert machine.policy.waiting == 0.0
    assert not machine.policy.is_bound


def test_a_wait_for_something_else_is_no_wait_to_launch() -> None:
    machine = Machine(equal, lost=0.8)  # reading a file, with every limit
    machine.run(20_000)
    assert machine.policy.limit is None
    assert machine.policy.waiting == 0.0
    assert not machine.policy.is_bound


def under_a_limit() -> LaunchLimit:
    """Two ranks that take turns; a forward with its turn waits 2 ms for something else."""
    policy = LaunchLimit(2)
    while policy.limit is None or policy.is_trying:
        rate = 128 if policy.limit == 1 else 64
        policy.seen(Window(500.0, 8.0, rate, Calls(64, 5.0, 3.0), Calls(64, 0.1, 0.1)))
    return policy


def test_waiting_is_for_a_turn_and_for_the_lock_in_it() -> None:
    policy = under_a_limit()
    for _ in range(5):
        policy.seen(Window(500.0, 8.0, 128, Calls(64, 6.0, 3.0, 4.0), Calls(64, 0.5, 0.5, 1.0)))
    assert policy.waiting == pytest.approx(64 * (4.0 + 1.0 + 1.0) / (2 * 500.0))


def test_hosts_that_wait_for_their_devices_are_not_launch_bound() -> None:
    policy = under_a_limit()
    for ahead_ms in (40.0, 60.0):  # of 1,000 ms of two ranks
        for _ in range(BOUND_WINDOWS + 3):
            policy.seen(Window(500.0, 8.0, 128, Calls(64, 5.0, 3.0, 5.0), ahead_ms=ahead_ms))
        assert (policy.waiting == 0.0) is (ahead_ms == 60.0)
        assert policy.is_bound is (ahead_ms == 40.0)


def test_outliers_do_not_count() -> None:
    calls = Calls.of(100, [(0.003, 0.002, 0.001)] * 7 + [(0.2, 0.1, 0.5)])
    assert calls.count == 100
    assert (calls.ms, calls.cpu_ms, calls.place_ms) == pytest.approx((3.0, 2.0, 1.0))
    assert Calls.of(5, []) == Calls(5)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_limit_under_which_losses_wait_is_tried_once(noise: float) -> None:
    machine = Machine(waiting, ranks=2, noise=noise, lost=0.9, waits=0.9)
    under_it = 0
    while machine.spent_ms < 5_000:
        under_it += machine.policy.limit == 1
        machine.window()
    assert under_it == 1
    assert machine.policy.limit is None
    # Unless there is a gain in spite of such waits: other programs use the cores.
    crowded = Machine(convoy, noise=noise, waits=0.6)
    crowded.run(10_000)
    assert crowded.policy.limit == 1


def test_too_few_forwards_tell_nothing() -> None:
    policy = LaunchLimit(4)
    assert not policy.is_enough(1_000.0, 4 * 16 - 1)
    assert not policy.is_enough(200.0, 1_000)
    assert policy.is_enough(250.0, 4 * 16)
    assert policy.is_enough(4_000.0, 4 * 8)
