"""Tests of the virtual cluster without faults: times add up, and runs repeat with the same seed."""

from __future__ import annotations

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import WorkerMachine
from flowdp.options import Policy
from flowdp.protocol.commands import Command, RoundEnded
from flowdp.protocol.gate_state import GateState
from flowdp.protocol.messages import Fact
from flowdp.sim.plan import simulate
from flowdp.sim.world import VirtualRank, World


def world(policy: Policy = "sync", coordinator: type[Coordinator] = Coordinator, seed: int = 0) -> World:
    config = CoordinatorConfig(world_size=2, batches=20, epochs=1, policy=policy)
    ranks = [VirtualRank(WorkerMachine(rank), ms) for rank, ms in enumerate((10.0, 20.0))]
    machine = coordinator(config)
    return World(machine, GateState(2), ranks, seed=seed, sync_ms=2.0, noise=0.0, batch_size=8)


def test_time_adds_up() -> None:
    made = world()
    made.run()
    # 10 rounds: 20 ms of the slow rank, 2 ms of averaging, then the messages.
    assert 220.0 <= made.clock.now_ms < 223.0
    assert [rank.trained_ms for rank in made.ranks] == [100.0, 200.0]
    assert sum(record.rounds for record in made.records if isinstance(record, RoundEnded)) == 10
    assert {rank.state for rank in made.ranks} == {"gone"}


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_same_seed_same_facts(policy: Policy) -> None:
    runs = [world(policy, seed=seed) for seed in (0, 0, 1)]
    for run in runs:
        run.run()
    assert runs[0].facts == runs[1].facts
    assert runs[0].facts != runs[2].facts


def test_a_deadlock_is_an_error() -> None:
    class Mute(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            return []

    with pytest.raises(ProtocolError, match="nothing is left to happen"):
        world(coordinator=Mute).run()


def test_a_prediction_runs_no_check_of_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Coordinator, "check")
    assert simulate([1.0, 2.0], batches=20).rounds > 0
