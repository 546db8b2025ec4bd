"""Tests of the virtual cluster of several machines: gates on two levels, links, and means on their way."""

from __future__ import annotations

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import Outcome, TaskDone
from flowdp.sim.world import VirtualRank
from tests.simulator.machines import Links, MachinesWorld


class Recorded(MachinesWorld):
    """Keeps the outcomes in the order in which they were held, with their times."""

    def held(self, outcome: Outcome, sync_ms: float) -> None:
        self.outcomes = [*getattr(self, "outcomes", []), (self.clock.now_ms, outcome)]
        super().held(outcome, sync_ms)


def world(
    inner_rounds: int = 3,
    *,
    mean_ms: float = 5.0,
    latency_ms: float = 0.0,
    overlaps: bool = False,
    machines: tuple[int, ...] = (2, 1),
) -> Recorded:
    """Three ranks of 1 ms a step in rounds of ten steps."""
    config = CoordinatorConfig(
        world_size=3,
        batches=369,  # a round of three steps each that measures, and twelve of ten
        epochs=1,
        cadence=CadenceOptions(anchor=10, max_anchor=10),
        machines=machines,
        inner_rounds=inner_rounds,
        overlaps=overlaps,
    )
    made = Recorded(
        Coordinator(config),
        GateState(3),
        [VirtualRank(WorkerMachine(rank), 1.0) for rank in range(3)],
        seed=0,
        sync_ms=2.0,
        noise=0.0,
        batch_size=8,
        latency_ms=0.0,
        links=Links((0.0,) + (latency_ms,) * (len(machines) - 1), mean_ms) if machines else None,
    )
    made.run()
    return made


def test_machines_meet_once_in_several_rounds_and_their_ranks_in_each() -> None:
    made = world()
    whole = [outcome for _, outcome in made.outcomes if not outcome.inner]
    inner = [outcome for _, outcome in made.outcomes if outcome.inner]
    assert len(whole) == 5
    assert len(inner) == 2 * (12 - 4)
    assert {outcome.members for outcome in inner} == {(0, 1), (2,)}
    assert all(outcome.members == (0, 1, 2) for outcome in whole)
    assert [outcome.weights for outcome in whole] == [(24, 24, 24)] + [(240, 240, 240)] * 4
    assert whole[-1].global_step == made.coordinator.global_step == 369
    # The mean of one replica is that replica: it takes no time.
    assert made.clock.now_ms == pytest.approx(123.0 + 5 * (2.0 + 5.0) + 8 * 2.0)


def test_a_mean_that_travels_costs_no_time_until_it_is_late() -> None:
    free = world(overlaps=True, mean_ms=25.0)
    late = world(overlaps=True, mean_ms=100.0)
    settled = [now_ms for now_ms, fact in free.facts if isinstance(fact, TaskDone)]
    assert len(settled) == 3
    whole_ms = [now_ms for now_ms, outcome in free.outcomes if not outcome.inner]
    # The order behind the round that measures is as long as all others: every mean is there in time.
    assert whole_ms == pytest.approx([5.0, 41.0, 77.0, 113.0, 149.0])
    # At the end the last one comes in.
    assert settled == pytest.approx([149.0 + 25.0 + 2.0] * 3)
    assert late.clock.now_ms > 5 * 100.0
