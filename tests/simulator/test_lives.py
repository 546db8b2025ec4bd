"""Several lives: each begins where the one before was saved, as a file would give it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.config import BarrierPlan, CoordinatorConfig
from flowdp.policy.interval import Interval, SaveBudget
from tests.simulator.cluster import JudgedWorld
from tests.simulator.lives import play
from tests.simulator.scenario import Crash, Scenario

CONFIG = CoordinatorConfig(
    world_size=2, batches=20, epochs=2, policy="sync", tasks=BarrierPlan(Interval(4, "step"))
)
SCENARIO = Scenario(seed=0, config=CONFIG, ms_per_step=(1.0, 1.0), sync_ms=0.1, latency_ms=0.0)


@pytest.fixture(autouse=True)
def saves_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no checkpoint be put off."""
    monkeypatch.setattr(SaveBudget, "free_ms", property(lambda _: -math.inf, lambda *_: None), raising=False)


def lives(**given: Any) -> list[JudgedWorld]:
    first = replace(SCENARIO, crashes=(Crash(1, "mean", 7),))
    return play(replace(first, later=replace(SCENARIO, **given)))


def starts(worlds: list[JudgedWorld]) -> list[int]:
    return [world.scenario.config.start.global_step for world in worlds[1:] if world.scenario.config.start]


def test_the_next_life_begins_at_the_last_checkpoint() -> None:
    worlds = lives()
    assert starts(worlds) == [12]
    [_, second] = worlds
    assert second.rules.finish is not None
    assert second.rules.finish.global_step == 40
    assert sum(second.rules.steps) == 28


def test_on_other_devices_and_for_longer() -> None:
    config = replace(CONFIG, world_size=3, epochs=4, policy="cadence")
    [_, second] = lives(config=config, ms_per_step=(1.0, 2.0, 3.0))
    assert second.rules.epochs == [0, 1, 2, 3]


def test_who_fails_before_the_first_checkpoint_begins_where_the_last_life_did() -> None:
    second = replace(SCENARIO, crashes=(Crash(0, "start", 0),), later=SCENARIO)
    worlds = lives(crashes=second.crashes, later=second.later)
    assert starts(worlds) == [12, 12]


def test_a_stream_goes_on_at_the_beginning_of_an_epoch_alone() -> None:
    config = replace(CONFIG, batches=None, tasks=BarrierPlan(Interval(1, "step")))
    stream = replace(SCENARIO, config=config, lengths=(9,), read_ms=0.1)
    worlds = play(replace(stream, later=replace(stream, begins_at=0.0)))
    start = worlds[1].scenario.config.start
    assert start is not None
    assert (start.done, start.open) == (1, ())
