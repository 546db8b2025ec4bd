"""The rules of rounds of one big step, each broken by hand; the mutants show that they bite in whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.worker import Step
from flowdp.protocol.commands import Finish
from flowdp.protocol.gate import Window
from flowdp.protocol.messages import Outcome, SampleRange
from tests.simulator.faults import Crash, Scenario
from tests.simulator.violation import Violation
from tests.simulator.windows import Windows

CONFIG = CoordinatorConfig(world_size=3, batches=2, epochs=1, policy="exact", global_batch=GlobalBatch(8, 13))
SCENARIO = Scenario(seed=0, config=CONFIG, ms_per_step=(1.0, 1.0, 1.0), batch_size=3)


def outcome(global_step: int, **wishes: bool) -> Outcome:
    return Outcome(global_step - 1, global_step, (0, 1, 2), (1, 1, 0), (5, 3, 0), **wishes)


def train(judge: Windows, parts: Sequence[tuple[int, int]], window: int = 0, position: int = 0) -> None:
    for start, stop in parts:
        judge.trained(Step(0, (window,), position, part=SampleRange(start, stop)))


def hold(parts: Sequence[tuple[int, int]], window: int = 0, position: int = 0) -> tuple[int, int]:
    judge = Windows(SCENARIO)
    train(judge, parts, window, position)
    [window_held] = judge.held(outcome(1))
    return window_held


def test_parts_in_any_order_tile_a_window() -> None:
    assert hold([(5, 8), (0, 5)]) == (0, 0)
    assert hold([(0, 1), (1, 5)], window=1) == (0, 1)  # the last one has what remains


@pytest.mark.parametrize(
    "parts", [[(0, 5), (6, 8)], [(0, 5), (4, 8)], [(0, 5)], [(0, 5), (5, 9)], [(1, 8)], [(0, 8), (0, 8)]]
)
def test_parts_that_do_not_tile_it(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(Violation, match=r"^S15: "):
        hold(parts)


def test_a_part_too_small_for_batch_norm() -> None:
    judge = Windows(replace(SCENARIO, config=replace(CONFIG, global_batch=GlobalBatch(8, 13, least=2))))
    train(judge, [(0, 6), (6, 8)])
    assert judge.held(outcome(1)) == [(0, 0)]
    train(judge, [(0, 7), (7, 8)])
    with pytest.raises(Violation, match=r"^S15: .* one is too small"):
        judge.held(outcome(1))


def test_the_last_window_is_smaller() -> None:
    with pytest.raises(Violation, match=r"^S15: .* window 1 "):
        hold([(0, 8)], window=1)


def test_ranks_in_different_windows() -> None:
    judge = Windows(SCENARIO)
    train(judge, [(0, 4)], window=0)
    train(judge, [(4, 8)], window=1)
    with pytest.raises(Violation, match=r"^S16: round 0 is not of one window"):
        judge.held(outcome(1))


def alone(judge: Windows, positions: Sequence[int], steps: tuple[int, ...] = (2, 0, 0)) -> object:
    for window, (position, stop) in enumerate(zip(positions, (8, 5), strict=True)):
        judge.trained(Step(0, (window,), position, part=SampleRange(0, stop), alone=True))
    return judge.held(Outcome(0, 2, (0, 1, 2), steps, (13, 0, 0)))


def test_steps_of_one_rank_alone() -> None:
    assert alone(Windows(SCENARIO), [0, 1]) == [(0, 0), (0, 1)]
    with pytest.raises(Violation, match=r"^S16: .* not the step at 1"):
        alone(Windows(SCENARIO), [0, 0])
    with pytest.raises(Violation, match=r"^S16: .* one rank takes alone"):
        alone(Windows(SCENARIO), [0, 1], (1, 1, 0))


def test_a_round_of_nothing() -> None:
    with pytest.raises(Violation, match=r"^S16: "):
        hold([])


def test_ranks_at_different_places_of_the_schedule() -> None:
    judge = Windows(SCENARIO)
    train(judge, [(0, 4)], position=0)
    train(judge, [(4, 8)], position=1)
    with pytest.raises(Violation, match=r"^S16: .* not the step at 0"):
        judge.held(outcome(1))


def test_a_round_that_counts_as_two_steps() -> None:
    judge = Windows(SCENARIO)
    train(judge, [(0, 5), (5, 8)])
    with pytest.raises(Violation, match=r"^S16: "):
        judge.held(outcome(2))


def test_an_epoch_that_ends_without_a_comparison() -> None:
    judge = Windows(SCENARIO)
    train(judge, [(0, 8)])
    judge.held(outcome(1, window=Window(compare=True)))
    train(judge, [(0, 5)], window=1, position=1)
    judge.held(outcome(2))
    with pytest.raises(Violation, match=r"^S17: epoch 0"):
        judge.ended(0)


def test_a_stop_without_a_comparison() -> None:
    judge = Windows(SCENARIO)
    train(judge, [(0, 8)])
    with pytest.raises(Violation, match=r"^S17: "):
        judge.held(outcome(1, stop=True))


def finish(error: str | None) -> Finish:
    return Finish(error, False, 2, 1)


def compared(scenario: Scenario) -> Windows:
    judge = Windows(scenario)
    train(judge, [(0, 5)], window=1)
    judge.held(outcome(1, window=Window(compare=True)))
    judge.ended(0)
    return judge


def test_a_replica_that_differs_has_to_be_named() -> None:
    differing = replace(SCENARIO, differs=(2, 0))
    compared(differing).over(finish("the parameters of rank 2 are not those of the others"))
    for error in (None, "the parameters of rank 0 are not those of the others"):
        with pytest.raises(Violation, match=r"^S17: rank 2 differs"):
            compared(differing).over(finish(error))


def test_nobody_is_named_who_does_not_differ_yet() -> None:
    later = replace(SCENARIO, differs=(2, 1))
    compared(later).over(finish(None))
    with pytest.raises(Violation, match=r"^S17: "):
        compared(later).over(finish("the parameters of rank 2 are not those of the others"))


def test_a_crash_may_come_first() -> None:
    crashing = replace(SCENARIO, differs=(2, 0), crashes=(Crash(0, "step", 0),))
    compared(crashing).over(finish("rank 0 failed"))
