"""The judge of rounds on two levels, broken by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.protocol.messages import Outcome
from tests.simulator.levels import Levels
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

CONFIG = CoordinatorConfig(world_size=3, batches=100, machines=(2, 1), inner_rounds=3)


def judge() -> Levels:
    return Levels(Scenario(seed=0, config=CONFIG, ms_per_step=(1.0, 1.0, 1.0)))


def inner(round: int = 0, **given: object) -> Outcome:
    made = Outcome(round, 2, (0, 1), (1, 1, 0), (8, 8, 0), inner=True)
    return replace(made, **given)  # type: ignore[arg-type]


def whole(samples: tuple[int, ...], earlier: tuple[int, ...] = (), bad: tuple[int, ...] = ()) -> Outcome:
    return Outcome(2, 9, (0, 1, 2), (1, 1, 1), samples, earlier=earlier, bad=bad)


def test_weights_are_those_of_all_rounds_since_the_last_one_of_all() -> None:
    levels = judge()
    levels.held(inner(), [8, 8, 0], ())
    levels.held(whole((8, 8, 8), (8, 8, 0)), [8, 8, 8], ())
    levels.held(whole((8, 8, 8)), [8, 8, 8], ())


def test_other_weights_are_wrong() -> None:
    levels = judge()
    levels.held(inner(), [8, 0, 0], ())
    with pytest.raises(Violation, match="S26"):
        levels.held(whole((8, 8, 8), (8, 8, 0)), [8, 8, 8], ())


def test_a_machine_without_a_finite_replica_weighs_nothing() -> None:
    levels = judge()
    levels.held(inner(), [8, 8, 0], ())
    levels.held(whole((0, 0, 8), bad=(0, 1)), [0, 0, 8], {0})
    levels.held(inner(), [8, 8, 0], ())
    with pytest.raises(Violation, match="S26"):
        levels.held(whole((0, 0, 8), (8, 8, 0), bad=(0, 1)), [0, 0, 8], {0})


def test_a_doubtful_machine_may_weigh_what_it_has_trained_since() -> None:
    levels = judge()
    levels.held(inner(), [8, 8, 0], ())
    levels.held(whole((0, 0, 8), bad=(0, 1)), [0, 0, 8], ())
    levels.held(inner(), [8, 8, 0], ())
    with pytest.raises(Violation, match="S26"):
        levels.held(whole((0, 0, 8), bad=(0,)), [0, 0, 8], ())


def test_a_weight_without_a_replica_that_has_it_is_wrong() -> None:
    levels = judge()
    levels.held(inner(), [8, 8, 0], ())
    with pytest.raises(Violation, match="no replica"):
        levels.held(whole((0, 0, 8), (8, 8, 0), bad=(0, 1)), [0, 0, 8], ())


@pytest.mark.parametrize("wish", ["stop", "pause", "halt"])
def test_an_inner_round_decides_for_nobody_else(wish: str) -> None:
    with pytest.raises(Violation, match="S27"):
        judge().held(inner(**{wish: True}), [8, 8, 0], ())


def test_an_inner_round_is_one_of_a_whole_machine() -> None:
    with pytest.raises(Violation, match="S27"):
        judge().held(inner(members=(0,)), [8, 8, 0], ())


def test_a_machine_meets_the_others_as_often_as_it_shall() -> None:
    levels = judge()
    for round in range(2):
        levels.held(inner(round), [8, 8, 0], ())
    with pytest.raises(Violation, match="S27"):
        levels.held(inner(2), [8, 8, 0], ())


def test_ranks_of_two_machines_have_inner_outcomes_of_their_own() -> None:
    levels = judge()
    other = inner(members=(2,))
    levels.judge_same(0, inner(), 2, other)
    for rank, mine, peer, theirs in (
        (0, inner(), 1, inner()),
        (0, inner(), 2, inner(1)),
        (0, inner(), 2, whole((8, 8, 8))),
        (0, whole((8, 8, 8)), 2, whole((8, 8, 8))),
    ):
        with pytest.raises(Violation, match="S2"):
            levels.judge_same(rank, mine, peer, theirs)
