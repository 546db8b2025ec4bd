"""The judge of what was trained in effect, each of its rules broken by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.worker import Step
from flowdp.policy.tally import RankSums
from flowdp.protocol.position import OpenEpoch, Position
from tests.simulator.effect import Effect, Memory
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

SCENARIO = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=4, epochs=2),
    ms_per_step=(1.0, 1.0),
    batch_size=8,
    last_batch=3,
)


def effect(memory: Memory | None = None) -> Effect:
    return Effect(SCENARIO, memory or Memory())


def train(judge: Effect, rank: int, *batches: int, epoch: int = 0) -> None:
    for batch in batches:
        judge.stepped(rank, Step(epoch, (batch,), 0))


def test_a_mean_holds_the_oldest_steps() -> None:
    judge = effect()
    train(judge, 0, 0, 3, 1)
    assert (judge.uncredited(0), judge.samples[0], judge.global_step) == (3, 19, 3)
    judge.met(0, 2)
    assert (judge.uncredited(0), judge.samples[0]) == (1, 8)


def test_what_was_trained_twice() -> None:
    judge = effect()
    train(judge, 0, 1)
    with pytest.raises(Violation, match=r"^S1: "):
        train(judge, 1, 1)
    remembers = effect(Memory(trained=Counter({(0, 1): 1}), global_step=1))
    assert remembers.global_step == 1
    with pytest.raises(Violation, match=r"^S1: "):
        train(remembers, 1, 1)


def test_what_is_lost_is_trained_again_once() -> None:
    judge = effect()
    train(judge, 0, 0, 1)
    judge.met(0, 1)
    judge.lose(0)
    assert (judge.steps[0], judge.steps_in[0]) == (1, 1)
    with pytest.raises(Violation, match=r"^S20: \[\(0, 1\)\]"):
        judge.judge_lost(0)
    judge.judge_lost(1)
    train(judge, 1, 1)
    judge.judge_lost(0)
    with pytest.raises(Violation, match=r"^S20: "):
        train(judge, 1, 1)
    with pytest.raises(Violation, match=r"^S1: "):
        train(judge, 1, 0)


def test_a_complete_run() -> None:
    judge = effect()
    train(judge, 0, 0, 1)
    judge.judge_missing({(0, 0), (0, 1)})
    for other in ({(0, 0)}, {(0, 0), (0, 1), (0, 2)}):
        with pytest.raises(Violation, match=r"^S1: "):
            judge.judge_missing(other)


def stood() -> Effect:
    """Epoch 0 and half of epoch 1, batch 0 left out."""
    judge = effect()
    train(judge, 0, 0, 1)
    train(judge, 1, 2, 3)
    train(judge, 1, 1, epoch=1)
    judge.met(0, 2)
    judge.met(1, 3)
    return judge


OPEN = OpenEpoch(1, 2, ((0,), ()), (RankSums(), RankSums(steps=1, samples=8)))
POSITION = Position(2, done=1, open=(OPEN,), global_step=5)


def test_a_true_position() -> None:
    stood().judge_position(POSITION)


@pytest.mark.parametrize(
    "change",
    [
        {"global_step": 4},
        {"done": 0},
        {"open": ()},
        {"open": (replace(OPEN, left=((), ())),)},
        {"open": (replace(OPEN, position=3, left=((0,), (2,)), epoch=0),)},
        {"open": (replace(OPEN, sums=(RankSums(), RankSums(steps=2, samples=8))),)},
        {"open": (replace(OPEN, sums=(RankSums(), RankSums(steps=1, samples=7))),)},
    ],
)
def test_a_false_position(change: dict[str, Any]) -> None:
    with pytest.raises(Violation, match=r"^S19: "):
        stood().judge_position(replace(POSITION, **change))


def test_a_position_with_steps_that_no_mean_holds() -> None:
    judge = stood()
    train(judge, 0, 2, epoch=1)
    with pytest.raises(Violation, match=r"^S19: "):
        judge.judge_position(POSITION)
