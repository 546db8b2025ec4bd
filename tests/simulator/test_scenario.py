"""What a scenario says of itself: how long its epochs are, and how long it may take."""

from __future__ import annotations

from typing import Any

from flowdp.machine.config import CoordinatorConfig
from flowdp.protocol.position import OpenEpoch, Position
from tests.simulator.scenario import Crash, Scenario


def scenario(**config: Any) -> Scenario:
    made = CoordinatorConfig(**{"world_size": 1, "batches": 10, "epochs": 3, **config})
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
