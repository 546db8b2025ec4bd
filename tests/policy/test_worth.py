"""Tests of the choice between cut batches and one device, and of the worth of captured steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from flowdp.policy.worth import (
    BLOCK_STEPS,
    BLOCKS,
    LEAST_STEPS,
    SETTLED,
    WARM_STEPS,
    WATCHED,
    LaunchWatch,
    Periods,
    Worth,
)

TRIAL = WARM_STEPS + BLOCK_STEPS * BLOCKS  # steps of a way in one trial
SAMPLES = 32

Machine = Callable[[int, bool], float]
"""(step, whether its batches are cut) -> milliseconds."""


@dataclass
class Loop:
    """A loop on a virtual machine.

    Args:
        noise: Standard deviation of the logarithm of what the measured times are multiplied with.

    Attributes:
        ways: Per step: whether its batches were cut.
        lost_ms: Time that the loop has spent on the slower way, beyond that of the faster one.
        least_ms: Time of the faster way at each step.
        can_be_cut: Whether the loop has batches to cut.
        trials: Steps at which a trial has ended.
    """

    machine: Machine
    noise: float = 0.0
    seed: int = 0
    worth: Worth = field(default_factory=Worth)
    ways: list[bool] = field(default_factory=list)
    lost_ms: float = 0.0
    least_ms: float = 0.0
    can_be_cut: bool = True
    trials: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = random.Random(self.seed)

    def run(self, steps: int) -> Loop:
        for _ in range(steps):
            step, is_cut, was_chosen = len(self.ways), self.worth.is_cut, self.worth.is_chosen
            ms = self.machine(step, is_cut)
            least_ms = min(ms, self.machine(step, not is_cut))
            self.lost_ms += ms - least_ms
            self.least_ms += least_ms
            self.ways.append(is_cut)
            ms *= self._generator.lognormvariate(0.0, self.noise)
            self.worth.stepped(ms, SAMPLES, was_cut=is_cut and self.can_be_cut)
            if self.worth.is_chosen and not was_chosen:
                self.trials.append(step)
        return self


def steady(cut_ms: float, alone_ms: float) -> Machine:
    return lambda _, is_cut: cut_ms if is_cut else alone_ms


def test_it_begins_with_cut_batches_and_tries_both_ways() -> None:
    loop = Loop(steady(2.0, 1.0)).run(2 * TRIAL)
    assert loop.ways == [True] * TRIAL + [False] * TRIAL
    assert loop.trials == [2 * TRIAL - 1]
    assert not loop.worth.is_cut
    assert loop.worth.ms == {True: 2.0 / SAMPLES, False: 1.0 / SAMPLES}


@pytest.mark.parametrize(("cut_ms", "winner"), [(0.6, True), (1.5, False), (20.0, False)])
def test_it_takes_the_faster_way(cut_ms: float, winner: bool) -> None:
    loop = Loop(steady(cut_ms, 1.0)).run(2 * TRIAL + 50)
    assert loop.worth.is_chosen
    assert loop.worth.is_cut is winner
    assert loop.ways[2 * TRIAL :] == [winner] * 50


@pytest.mark.parametrize("ratio", [0.3, 0.55, 0.9, 0.99, 1.0, 1.01, 1.1, 1.5, 3.0, 20.0])
@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.022), (0.1, 0.022), (0.3, 0.04)])
def test_the_slower_way_costs_little(ratio: float, noise: float, most: float) -> None:
    for seed in range(4):
        loop = Loop(steady(ratio, 1.0), noise, seed).run(2 * TRIAL)
        loop.lost_ms = 0.0  # of the first trial
        loop.run(20_000)
        assert loop.lost_ms < most * loop.least_ms


@pytest.mark.parametrize("at", range(2 * TRIAL))
@pytest.mark.parametrize("winner", [True, False])
def test_an_evaluation_between_two_steps_decides_nothing(at: int, winner: bool) -> None:
    machine = steady(0.9 if winner else 1.1, 1.0)
    loop = Loop(lambda step, is_cut: machine(step, is_cut) + 5000.0 * (step == at)).run(2 * TRIAL)
    assert loop.worth.is_chosen
    assert loop.worth.is_cut is winner


def test_batches_of_many_sizes_are_compared_by_sample() -> None:
    worth = Worth()
    for step in range(2 * TRIAL):
        samples = 8 if step < TRIAL else 64  # of the way that is tried second, more
        worth.stepped(samples * (0.6 if worth.is_cut else 1.0), samples, was_cut=worth.is_cut)
    assert worth.is_cut
    assert worth.ms == {True: pytest.approx(0.6), False: pytest.approx(1.0)}


def test_steps_in_which_nothing_could_be_cut_are_the_first_devices() -> None:
    loop = Loop(steady(0.6, 1.0), can_be_cut=False).run(2 * TRIAL)
    assert loop.worth.is_chosen
    assert not loop.worth.is_cut
    loop.can_be_cut = True  # from here on there are batches
    loop.run(1000)
    assert loop.worth.is_chosen
    assert loop.worth.is_cut


@pytest.mark.parametrize("period", [2, 3])
def test_steps_without_samples_are_steps(period: int) -> None:
    worth = Worth()
    for step in range(2 * TRIAL):
        samples = 0 if step % period else 8
        took_ms = samples * (0.6 if worth.is_cut else 1.0) + 0.1
        worth.stepped(took_ms, samples, was_cut=worth.is_cut and samples > 0)
    assert worth.is_chosen
    assert worth.is_cut


def test_pauses_grow_while_the_answer_stays_the_same() -> None:
    loop = Loop(steady(1.05, 1.0)).run(8000)
    pauses = [after - before - 2 * TRIAL for before, after in zip(loop.trials, loop.trials[1:], strict=False)]
    assert pauses[:5] == [LEAST_STEPS * 2**k for k in range(5)]


@pytest.mark.parametrize("at", [500, 3000, 20_000])
@pytest.mark.parametrize("first", [True, False])
def test_a_machine_that_changes_its_mind(at: int, first: bool) -> None:
    def machine(step: int, is_cut: bool) -> float:
        return 1.0 if is_cut is (first if step < at else not first) else 1.5

    loop = Loop(machine).run(at)
    assert loop.ways[2 * TRIAL :].count(first) > 0.95 * (at - 2 * TRIAL)
    # It is found in the time for which the other answer was right.
    loop.run(at + 4 * TRIAL + LEAST_STEPS)
    assert loop.worth.is_chosen
    assert loop.worth.is_cut is not first
    # And a new answer is asked again soon.
    found = next(step for step in loop.trials if step >= at)
    loop.run(LEAST_STEPS + 2 * TRIAL + 300)
    assert any(0 < step - found <= 50 * 0.5 * TRIAL + 2 * TRIAL + 1 for step in loop.trials)


def test_a_trial_that_another_program_has_spoilt_is_mended_at_the_next() -> None:
    def machine(step: int, is_cut: bool) -> float:
        return (0.7 if is_cut else 1.0) * (3.0 if step < TRIAL else 1.0)

    loop = Loop(machine).run(2 * TRIAL)
    assert not loop.worth.is_cut
    loop.run(3000)
    assert loop.worth.is_cut


@pytest.mark.parametrize(("device_ms", "is_behind"), [(1.0, True), (1.09, True), (1.5, False)])
def test_a_host_is_behind_where_the_device_ends_with_its_launches(device_ms: float, is_behind: bool) -> None:
    watch = LaunchWatch()
    for number in range(WATCHED):
        assert watch.is_behind is None
        watch.take(1.0, 100.0 if number < SETTLED else device_ms)
    assert watch.is_behind is is_behind
    assert (watch.launch_ms, watch.device_ms) == (1.0, device_ms)
    watch.take(1.0, 100.0)
    assert watch.is_behind is is_behind


def periods(eager_ms: float, captured_ms: float, at: dict[int, float] | None = None) -> Periods:
    """A loop of WATCHED eager calls and enough captured ones; `at`: ms more behind one of them."""
    periods, now_ms, calls = Periods(), 0.0, 0
    while periods.is_slower is None:
        periods.begins(now_ms)
        is_captured = calls >= WATCHED
        periods.was(is_captured=is_captured)
        now_ms += (captured_ms if is_captured else eager_ms) + (at or {}).get(calls, 0.0)
        calls += 1
    assert calls == 2 * WATCHED + 1
    return periods


@pytest.mark.parametrize(
    ("captured_ms", "is_slower"), [(0.5, False), (0.99, False), (1.01, True), (3.0, True)]
)
def test_captured_calls_are_kept_where_the_loop_is_faster_with_them(
    captured_ms: float, is_slower: bool
) -> None:
    seen = periods(1.0, captured_ms)
    assert seen.is_slower is is_slower
    assert (seen.eager_ms, seen.captured_ms) == pytest.approx((1.0, captured_ms))
    # First calls load kernels, and evaluations lie between others.
    loud = dict.fromkeys([*range(SETTLED), 20, 33, 60, 77], 500.0)
    assert periods(1.0, captured_ms, loud).is_slower is is_slower


def test_a_step_of_several_calls_is_judged_as_a_whole() -> None:
    seen, now_ms = Periods(), 0.0
    for call in range(2 * WATCHED + 1):
        is_captured = call >= WATCHED
        seen.begins(now_ms)
        seen.was(is_captured=is_captured)
        # Two calls of a step follow each other at once; the rest of it is what graphs make slower.
        now_ms += 0.1 if call % 2 else 1.0 + 0.5 * is_captured
    assert seen.is_slower


def test_calls_that_are_recorded_or_compared_count_for_neither() -> None:
    seen = Periods()
    for call in range(4 * WATCHED):
        now_ms = float(call)
        seen.begins(now_ms)
        if call % 4:  # the time behind the fourth is as if it had never begun
            seen.was(is_captured=call > 2 * WATCHED)
    assert seen.is_slower is not None
    assert (seen.eager_ms, seen.captured_ms) == (1.0, 1.0)
