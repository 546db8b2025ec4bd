"""Barrier tasks on virtual time: all batches are evaluated, once, by whoever is free."""

from __future__ import annotations

import random
from dataclasses import replace

from flowdp.machine.barrier_tasks import BarrierPlan
from flowdp.machine.config import CoordinatorConfig
from flowdp.protocol.messages import CopyReplica, Evaluate, Evaluated, ReplicaCopied, SaveState, StateSaved
from flowdp.sim.clock import Clock
from tests.simulator.rules import Rules
from tests.simulator.scenario import Scenario
from tests.simulator.serving import Serving

SCENARIO = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=4, epochs=1, tasks=BarrierPlan(eval_every=1)),
    ms_per_step=(1.0, 1.0),
    sync_ms=3.0,
    eval_batches=9,
    eval_ms=10.0,
    capture_ms=5.0,
)


class Served:
    """Two ranks, and what they answer."""

    def __init__(self, crash: tuple[int, str] | None = None) -> None:
        rng = random.Random(0)
        self.clock = Clock(rng, 0.0)
        self.answers: dict[int, tuple[float, object]] = {}
        self.judge = Rules(SCENARIO)
        self.serving = Serving(
            SCENARIO,
            self.clock,
            rng,
            self.judge,
            lambda rank, where: (rank, where) == crash,
            lambda rank, fact: self.answers.update({rank: (self.clock.now_ms, fact)}),
        )

    def rest(self) -> None:
        while self.clock.advance():
            pass

    def batches(self) -> list[int]:
        facts = [fact for _, fact in self.answers.values() if isinstance(fact, Evaluated)]
        return [number for fact in facts for number, _, _ in fact.results]


def test_the_ranks_share_an_evaluation() -> None:
    served = Served()
    for epoch in (0, 1):
        for rank in (0, 1):
            served.judge.ordered(rank, Evaluate(epoch, epoch), is_gone=False)
            served.serving.serve(rank, Evaluate(epoch, epoch))
        served.rest()
        assert sorted(served.batches()) == list(range(9))
        for _, fact in served.answers.values():
            assert isinstance(fact, Evaluated)
            assert fact.results
            served.judge.standing.answered(fact)


def test_one_that_is_cut_ends_with_the_batches_in_hand() -> None:
    served = Served()
    for rank in (0, 1):
        served.serving.serve(rank, Evaluate(0, 0))
    served.clock.advance()
    served.serving.cut()
    served.rest()
    assert sorted(served.batches()) == [0, 1, 2]


def test_a_rank_may_fail_in_a_barrier_task() -> None:
    served = Served(crash=(1, "evaluate"))
    for rank in (0, 1):
        served.serving.serve(rank, Evaluate(0, 0))
    served.rest()
    assert served.answers.keys() == {0}
    served = Served(crash=(1, "capture"))
    for rank in (0, 1):
        served.serving.serve(rank, SaveState(0))
    served.rest()
    assert served.answers.keys() == {0}


def test_capturing_and_adopting_take_their_time() -> None:
    served = Served()
    served.serving.serve(0, SaveState(0))
    served.serving.serve(1, CopyReplica(0))
    served.rest()
    at_ms, fact = served.answers[0]
    assert 0.0 < at_ms <= 5.0
    assert fact == StateSaved(0)
    assert served.answers[1] == (3.0, ReplicaCopied(1))


def test_the_same_seed_gives_the_same_results() -> None:
    first, second = Served(), Served()
    for served in (first, second):
        served.serving.serve(0, Evaluate(0, 0))
        served.rest()
    assert first.answers == second.answers
    assert replace(SCENARIO, seed=1) != SCENARIO
