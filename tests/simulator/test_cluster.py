"""The virtual cluster with its faults: time adds up, and what goes wrong shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.options import Policy
from flowdp.protocol.commands import Command, EpochMetrics, RoundEnded
from flowdp.protocol.messages import (
    Fact,
    Order,
    Requested,
    StartEpoch,
    SyncNow,
    Throttle,
    Tick,
    WorkerReady,
)
from tests.simulator.cluster import JudgedWorld, Machines
from tests.simulator.faults import Crash, Scenario, Wish
from tests.simulator.rules import Violation
from tests.simulator.scenario import Disturbance


def scenario(policy: Policy = "sync", **given: Any) -> Scenario:
    config = CoordinatorConfig(world_size=2, batches=20, epochs=1, policy=policy)
    return replace(
        Scenario(seed=0, config=config, ms_per_step=(10.0, 20.0), sync_ms=2.0, latency_ms=0.0), **given
    )


def ran(given: Scenario, **machines: Any) -> JudgedWorld:
    world = JudgedWorld(given, Machines(**machines))
    world.run()
    return world


def test_time_adds_up() -> None:
    world = ran(scenario())
    # 10 rounds: 20 ms of the slow rank, 2 ms of averaging.
    assert world.clock.now_ms == pytest.approx(220.0)
    assert [rank.trained_ms for rank in world.ranks] == [100.0, 200.0]
    rounds = [record for record in world.records if isinstance(record, RoundEnded)]
    [epoch] = [record for record in world.records if isinstance(record, EpochMetrics)]
    assert sum(record.rounds for record in rounds) == epoch.rounds == 10
    assert epoch.epoch_ms == pytest.approx(220.0)
    assert [rank.wait_ms for rank in epoch.per_rank] == [100.0, 0.0]
    assert [rank.sync_ms for rank in epoch.per_rank] == [20.0, 20.0]
    assert world.rules.steps == [10, 10]


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("where", ["start", "step", "enter", "mean", "snapshot", "apply"])
def test_a_crash_ends_the_run_for_all(policy: Policy, where: Any) -> None:
    world = ran(scenario(policy, crashes=(Crash(1, where, 0),)))
    finish = world.rules.finish
    assert finish is not None
    never = where in ("snapshot", "apply") and policy != "async"
    assert finish.error == (None if never else f"rank 1 failed at {where} 0")
    assert {rank.state for rank in world.ranks} == {"gone"}


def test_a_wish_is_taken_at_its_time() -> None:
    stop = Wish(50.0, Requested("stop"))
    world = ran(scenario("cadence", wishes=(stop,)))
    assert (50.0, Requested("stop")) in world.facts
    assert world.rules.finish is not None
    assert world.rules.finish.stopped
    # The slow rank's step and the averaging are finished, no more.
    assert 50.0 < world.clock.now_ms <= 50.0 + 20.0 + 2.0


def test_the_machine_is_called_at_its_deadline() -> None:
    late = scenario("cadence", slow_from=(1, 4, 10.0))
    world = ran(replace(late, config=replace(late.config, batches=60)))
    assert any(fact == Tick() for _, fact in world.facts)
    assert any(
        isinstance(r, RoundEnded) and r.reason == "it took too long and was cut short" for r in world.records
    )


def test_a_deadlock_is_nothing_left_to_happen() -> None:
    class Mute(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            return [] if isinstance(fact, WorkerReady) else super().handle(fact, now_ms)

    with pytest.raises(Violation, match=r"^L1: nothing is left to happen"):
        ran(scenario(), coordinator=Mute)


def test_an_endless_run_is_ended() -> None:
    class Restless(Coordinator):
        def deadline_ms(self) -> float | None:
            return self.asked

        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            self.asked = now_ms + 5.0
            return [] if isinstance(fact, WorkerReady) else super().handle(fact, now_ms)

    with pytest.raises(Violation, match=r"^L1: still running after"):
        ran(scenario(), coordinator=Restless)


# ---------------------------------------------------------------- data of unknown length
def stream(policy: Policy, **given: Any) -> Scenario:
    plain = scenario(policy, lengths=(41,), ahead=6)
    return replace(plain, config=replace(plain.config, batches=None), **given)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_slow_reader_is_kept_busy(policy: Policy) -> None:
    world = ran(stream(policy, read_ms=40.0))
    # Forty-one batches and the look for another; behind them the last step and its mean.
    assert 42 * 40.0 <= world.clock.now_ms < 42 * 40.0 + 30.0
    rounds = [record for record in world.records if isinstance(record, RoundEnded)]
    assert sum(sum(record.data_ms) for record in rounds) > 1000.0


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_fast_reader_holds_nobody_up(policy: Policy) -> None:
    known = scenario(policy)
    world = ran(replace(known, config=replace(known.config, batches=41)))
    streamed = ran(stream(policy))
    # The last round cannot be planned for what is left; the rest is the same.
    assert streamed.clock.now_ms <= world.clock.now_ms + 3 * 20.0 + 2.0


def test_a_pause_while_a_rank_waits_beyond_the_end() -> None:
    """All that exists is trained and averaged when the end is found, and two empty orders are out."""
    wishes = (Wish(75.0, Requested("pause")), Wish(76.0, Requested("unpause")))
    for policy in ("sync", "cadence", "async"):
        world = ran(stream(policy, lengths=(1,), read_ms=50.0, wishes=wishes))
        assert world.rules.finish is not None
        assert not world.rules.finish.stopped
        assert 100.0 <= world.clock.now_ms < 110.0


# ---------------------------------------------------------------- orders on the way of an ordinary run
def orders_of(given: Scenario) -> set[type]:
    sent: set[type] = set()

    class Listener(JudgedWorld):
        def send(self, number: int, order: Order) -> None:
            sent.add(type(order))
            super().send(number, order)

    Listener(given).run()
    return sent


def test_an_async_run_on_unequal_devices_starts_throttles_and_calls_to_the_gate() -> None:
    pause, unpause = Wish(50.0, Requested("pause")), Wish(60.0, Requested("unpause"))
    config = replace(scenario("async").config, batches=400)
    unequal = replace(scenario("async"), config=config, ms_per_step=(10.0, 28.0))
    assert {StartEpoch, Throttle} <= orders_of(unequal)
    assert {StartEpoch, Throttle, SyncNow} <= orders_of(replace(unequal, wishes=(pause, unpause)))


def test_a_cadence_run_calls_to_the_gate_when_a_rank_is_late() -> None:
    config = replace(scenario("cadence").config, batches=400)
    unequal = replace(scenario("cadence"), config=config, ms_per_step=(10.0, 28.0))
    assert SyncNow not in orders_of(unequal)
    assert SyncNow in orders_of(replace(unequal, disturbance=Disturbance(1, 30, 10.0)))
