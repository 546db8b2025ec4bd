"""Tests of the virtual cluster without faults: time, links, and runs that repeat with the same seed."""

from __future__ import annotations

import random

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import WorkerMachine
from flowdp.options import Policy
from flowdp.protocol.commands import Command, RoundEnded
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Fact
from flowdp.sim.world import Clock, VirtualRank, World


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


def test_things_happen_in_the_order_of_time_then_of_asking() -> None:
    clock = Clock(random.Random(0), 0.0)
    happened: list[tuple[float, str]] = []

    def note(name: str) -> None:
        happened.append((clock.now_ms, name))

    clock.after(5.0, note, "late")
    clock.after(1.0, note, "first")
    clock.after(1.0, note, "second")
    # A callback may schedule others.
    clock.after(2.0, lambda: clock.after(1.5, note, "asked for at 2"))
    while clock.advance():
        pass
    assert happened == [(1.0, "first"), (1.0, "second"), (3.5, "asked for at 2"), (5.0, "late")]
    assert not clock.advance()


def test_no_message_overtakes_another_on_its_link() -> None:
    clock = Clock(random.Random(1), 10.0)
    heard: dict[str, list[int]] = {"up": [], "down": []}
    for number in range(50):
        for link in heard:
            clock.send(link, heard[link].append, number)
    while clock.advance():
        assert clock.now_ms <= 10.0
    assert heard == {"up": list(range(50)), "down": list(range(50))}


def test_a_late_message_holds_its_link_and_no_other() -> None:
    clock = Clock(random.Random(1), 1.0)
    heard: list[str] = []
    clock.send("a", heard.append, "late", extra_ms=100.0)
    clock.send("a", heard.append, "behind it")
    clock.send("b", heard.append, "beside it")
    while clock.advance():
        pass
    assert heard == ["beside it", "late", "behind it"]
    assert clock.now_ms >= 100.0
