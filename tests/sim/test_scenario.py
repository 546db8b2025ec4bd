"""What a scenario says of itself: how long its epochs are, and how long it may take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.barrier_tasks import BarrierPlan, SavePlan
from flowdp.machine.config import RunConfig
from flowdp.protocol.messages import Requested
from flowdp.protocol.position import OpenEpoch, Position
from flowdp.sim.scenario import Crash, Scenario, Wish


def scenario(**config: Any) -> Scenario:
    made = RunConfig(**{"world_size": 1, "batches": 10, "epochs": 3, **config})
    return Scenario(seed=0, config=made, ms_per_step=(1.0,), sync_ms=0.0, latency_ms=0.0)


def test_only_what_a_rank_does_for_itself_fails_alone() -> None:
    places = ("start", "step", "enter", "mean", "snapshot", "apply", "evaluate", "capture")
    assert [where for where in places if Crash(0, where, 0).is_alone] == ["start", "step", "enter"]


def test_a_limit_counts_from_where_the_run_begins() -> None:
    assert [scenario(max_steps=25).dealt(epoch) for epoch in range(3)] == [10, 10, 5]
    start = Position(1, done=1, planned=10, global_step=14)
    assert [scenario(max_steps=25, start=start).dealt(epoch) for epoch in range(3)] == [10, 10, 5]


def test_what_was_dealt_before_is_come_to_though_the_limit_lies_behind_it() -> None:
    start = Position(1, done=1, open=(OpenEpoch(1, 4, ((),), ()),), planned=10, global_step=14)
    assert [scenario(max_steps=12, start=start).dealt(epoch) for epoch in range(3)] == [10, 4, 0]
    assert [scenario(max_steps=17, start=start).dealt(epoch) for epoch in range(3)] == [10, 7, 0]


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
    assert replace(scenario(tasks=tasks), wishes=wishes).standstills == standstills


def test_duties_take_their_time() -> None:
    calm = scenario()
    assert not calm.stands
    slow = replace(scenario(tasks=BarrierPlan(eval_every=1)), eval_batches=3, eval_ms=10.0, capture_ms=5.0)
    assert slow.stands
    assert slow.standstill_ms == 130.0
    assert slow.longest_run_ms - calm.longest_run_ms == pytest.approx(
        slow.standstills * slow.standstill_ms - calm.standstills * calm.standstill_ms
    )
