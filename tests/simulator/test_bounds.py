"""Bounds of a run by its scenario."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.barrier_tasks import BarrierPlan, SavePlan
from flowdp.machine.config import CoordinatorConfig
from flowdp.protocol.messages import Requested
from tests.simulator.bounds import Bounds
from tests.simulator.scenario import Scenario, Wish


def scenario(**config: Any) -> Scenario:
    made = CoordinatorConfig(**{"world_size": 1, "batches": 10, "epochs": 3, **config})
    return Scenario(seed=0, config=made, ms_per_step=(1.0,), sync_ms=0.0, latency_ms=0.0)


@pytest.mark.parametrize(
    ("tasks", "wishes", "standstills"),
    [
        (BarrierPlan(), (), 8),
        (BarrierPlan(SavePlan(2, "epoch")), (), 8),
        (BarrierPlan(SavePlan(10, "step")), (), 11),
        (BarrierPlan(SavePlan(0.1, "minute")), (), 38),
        (BarrierPlan(), (Wish(1.0, Requested("snapshot")),), 9),
    ],
)
def test_how_often_all_stand_still(tasks: BarrierPlan, wishes: tuple[Wish, ...], standstills: int) -> None:
    assert Bounds(replace(scenario(tasks=tasks), wishes=wishes)).standstills == standstills


def test_barrier_tasks_take_their_time() -> None:
    calm = Bounds(scenario())
    assert not calm.stands
    slow = Bounds(
        replace(scenario(tasks=BarrierPlan(eval_every=1)), eval_batches=3, eval_ms=10.0, capture_ms=5.0)
    )
    assert slow.stands
    assert slow.standstill_ms == 130.0
    assert slow.longest_run_ms - calm.longest_run_ms == pytest.approx(
        slow.standstills * slow.standstill_ms - calm.standstills * calm.standstill_ms
    )
