"""The judge of standstills, each of its rules broken by hand; mutants show that they bite in whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowdp.machine.config import BarrierPlan, CoordinatorConfig
from flowdp.policy.monitor import Best
from flowdp.protocol.commands import Finish, Save
from flowdp.protocol.messages import CopyReplica, Outcome, SaveState, TaskDone
from flowdp.protocol.position import Position
from tests.simulator.effect import Effect, Memory
from tests.simulator.scenario import Scenario
from tests.simulator.standing import Standing
from tests.simulator.violation import Violation


def judge(tasks: BarrierPlan | None = None, memory: Memory | None = None, **config: Any) -> Standing:
    made = CoordinatorConfig(world_size=2, batches=4, epochs=4, tasks=tasks or BarrierPlan(), **config)
    scenario = Scenario(seed=0, config=made, ms_per_step=(1.0, 1.0), eval_batches=2)
    memory = memory or Memory()
    return Standing(scenario, Effect(scenario, memory), memory)


def outcome(**fields: Any) -> Outcome:
    return Outcome(
        **{"round": 0, "global_step": 0, "members": (0, 1), "steps": (0, 0), "samples": (0, 0), **fields}
    )


def captured(standing: Standing, number: int = 0) -> None:
    for rank in (0, 1):
        standing.ordered(rank, SaveState(number), "")
    for rank in (0, 1):
        standing.answered(TaskDone(rank))


def save(version: int | None = 1, *, snapshots: int = 0, is_best: bool = False, **position: Any) -> Save:
    stands = Position(2, **{"versions": version or 0, "round": 9, **position})
    return Save(0, stands, version, snapshots, is_best=is_best)


def somebody_stirs(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "rank 1 is at step")


def an_order_in_a_task(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.told(1, "gets an order")


def saved_too_early(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.saved(save(), 0.0)


def another_capture(standing: Standing) -> None:
    captured(standing, 1)
    standing.saved(save(), 0.0)


def rounds_that_were_held(standing: Standing) -> None:
    standing.met(outcome(round=9))
    captured(standing)
    standing.saved(save(), 0.0)


def another_best(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(best=Best(1.0, 0)), 0.0)


def a_snapshot_counts_as_a_checkpoint(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(None, versions=1), 0.0)


def too_many_answers(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(snapshots=1), 0.0)


def sound_and_said(standing: Standing) -> None:
    standing.met(outcome(samples=(8, 0), bad=(1,)))


def adopts_from_a_bad_one(standing: Standing) -> None:
    for rank in (0, 1):
        standing.goes_bad(rank)
    standing.met(outcome(bad=(0, 1)))
    standing.ordered(0, CopyReplica(1), "")


def a_sound_one_adopts(standing: Standing) -> None:
    standing.ordered(0, CopyReplica(1), "")


def late_and_said_at_once(standing: Standing) -> None:
    standing.goes_bad(1, is_late=True)
    standing.met(outcome(samples=(8, 8), bad=(1,)))


def heard_and_told_to_go_on(standing: Standing) -> None:
    standing.goes_bad(1, is_late=True)
    standing.met(outcome(samples=(8, 8)))
    standing.acknowledged(1)
    standing.told(1, "gets an order")


def sound_and_heard(standing: Standing) -> None:
    standing.acknowledged(1)


def captures_a_bad_one(standing: Standing) -> None:
    standing.goes_bad(1, is_late=True)
    standing.met(outcome(samples=(8, 8)))
    standing.ordered(0, SaveState(0), "")


def a_bad_snapshot_is_averaged(standing: Standing) -> None:
    standing.goes_bad(0)
    standing.snapped(0, 3, 0)
    standing.averages(4)
    standing.averages(3)


def a_snapshot_is_not_taken(standing: Standing) -> None:
    standing.wishes("snapshot")
    standing.over(Finish(None, False, 0, 0))


BROKEN: list[tuple[str, Callable[[Standing], None]]] = [
    ("S18", somebody_stirs),
    ("S18", an_order_in_a_task),
    ("S18", saved_too_early),
    ("S18", another_capture),
    ("S19", rounds_that_were_held),
    ("S19", another_best),
    ("S23", a_snapshot_counts_as_a_checkpoint),
    ("S12", too_many_answers),
    ("S21", sound_and_said),
    ("S21", late_and_said_at_once),
    ("S21", heard_and_told_to_go_on),
    ("S21", sound_and_heard),
    ("S21", captures_a_bad_one),
    ("S21", adopts_from_a_bad_one),
    ("S21", a_sound_one_adopts),
    ("S21", a_bad_snapshot_is_averaged),
    ("L6", a_snapshot_is_not_taken),
]


@pytest.mark.parametrize(("rule", "break_it"), BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_broken(rule: str, break_it: Callable[[Standing], None]) -> None:
    with pytest.raises(Violation) as violation:
        break_it(judge())
    assert violation.value.rule == rule


def test_a_sound_standstill() -> None:
    standing = judge()
    standing.wishes("snapshot")
    standing.wishes("checkpoint")
    standing.goes_bad(1)
    standing.snapped(1, 3, 0)
    standing.met(outcome(samples=(8, 0), bad=(1,)))
    standing.ordered(1, CopyReplica(0), "")
    standing.answered(TaskDone(1))
    standing.healed(1)
    standing.moves(1, "begins (0, 0)")
    captured(standing)
    standing.saved(save(snapshots=1), 0.0)
    standing.moves(0, "begins (0, 1)")
    standing.over(Finish(None, True, 0, 0))
    assert [kept.version for kept, _ in standing.saves] == [1]
