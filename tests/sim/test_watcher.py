"""A watcher hears of every event of a virtual cluster, and a plain one does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact
from flowdp.sim.plan import simulate
from flowdp.sim.scenario import Scenario
from flowdp.sim.watcher import Watcher
from flowdp.sim.world import Machines, World

SCENARIO = Scenario(
    seed=0, config=CoordinatorConfig(world_size=2, batches=20, epochs=1), ms_per_step=(1.0, 2.0)
)


class Recorder(Watcher):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "heard":
            self.heard.append(name)
        return super().__getattribute__(name)


def test_a_watcher_hears_of_a_run_and_changes_nothing() -> None:
    recorder = Recorder()
    watched, plain = World(SCENARIO, watcher=recorder), World(SCENARIO)
    watched.run()
    plain.run()
    assert watched.facts == plain.facts
    assert recorder.heard.count("step_begins") == recorder.heard.count("step_ends") == 20
    assert {"hears", "decides", "ordered", "delivered", "enters", "met", "left", "over"} <= {*recorder.heard}
    assert recorder.heard[-2:] == ["over", "passes"]


def test_a_deadlock_without_a_judge_is_an_error() -> None:
    class Mute(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            return []

    with pytest.raises(ProtocolError, match="nothing is left to happen"):
        World(SCENARIO, Machines(coordinator=Mute)).run()


def test_a_prediction_runs_no_check_of_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Coordinator, "check")
    assert simulate([1.0, 2.0], batches=20).rounds > 0
