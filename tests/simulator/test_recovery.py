"""The judge of recovery sees a share that stays wrong, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.options import Policy
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position
from tests.simulator.cluster import JudgedWorld
from tests.simulator.faults import Disturbance
from tests.simulator.scenario import Scenario


def scenario(policy: Policy = "cadence", epochs: int = 70, for_ms: float = 5000.0) -> Scenario:
    return Scenario(
        seed=0,
        config=CoordinatorConfig(world_size=2, batches=10, epochs=epochs, policy=policy),
        ms_per_step=(20.0, 20.0),
        disturbance=Disturbance(rank=1, step=20, factor=100.0, for_ms=for_ms),
    )


def ran(given: Scenario) -> JudgedWorld:
    world = JudgedWorld(given)
    world.run()
    return world


def shares(world: JudgedWorld, epochs: int) -> list[int]:
    """Samples per rank of the last epochs."""
    ended = [record for record in world.records if isinstance(record, EpochMetrics)][-epochs:]
    return [sum(metrics.per_rank[rank].samples for metrics in ended) for rank in range(2)]


@pytest.mark.parametrize("for_ms", [0.0, 5000.0])
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_equal_devices_share_alike_when_one_of_them_was_slow(policy: Policy, for_ms: float) -> None:
    world = ran(scenario(policy, for_ms=for_ms))
    assert shares(world, 10) == pytest.approx([400, 400], abs=8)


def test_a_poisoned_pace_of_a_checkpoint_recovers() -> None:
    config = CoordinatorConfig(
        world_size=2, batches=10, epochs=12, start=Position(2, anchor=10, pace_ms=(20.0, 1600.0))
    )
    world = ran(Scenario(seed=0, config=replace(config, policy="cadence"), ms_per_step=(20.0, 20.0)))
    assert shares(world, 6) == [240, 240]


def test_a_device_that_is_too_slow_for_an_epoch_is_asked_ever_more_rarely() -> None:
    """It never has a step in time; 80 epochs cost a handful of its steps and no more."""
    config = CoordinatorConfig(world_size=2, batches=10, epochs=80, policy="cadence")
    world = ran(Scenario(seed=0, config=config, ms_per_step=(20.0, 2000.0)))
    assert 4 <= world.rules.steps[1] <= 12
