"""The judge of standstills, each of its rules broken by hand; mutants show that they bite in whole runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flowdp.machine.barrier_tasks import MINUTE_MS, BarrierPlan, SavePlan
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.policy.monitor import Best, Monitor
from flowdp.policy.tally import RankSums, Tally, Work
from flowdp.protocol.commands import EpochEnded, Finish, RoundEnded, Save
from flowdp.protocol.messages import CopyReplica, Evaluate, Outcome, SaveState, StateSaved
from flowdp.protocol.position import OpenEpoch, Position
from tests.simulator.effect import Effect, Memory
from tests.simulator.scenario import Scenario
from tests.simulator.standing import Standing
from tests.simulator.violation import Violation


def judge(tasks: BarrierPlan | None = None, memory: Memory | None = None, **config: Any) -> Standing:
    made = CoordinatorConfig(world_size=2, batches=4, epochs=4, tasks=tasks or BarrierPlan(), **config)
    scenario = Scenario(seed=0, config=made, ms_per_step=(1.0, 1.0), eval_batches=2)
    memory = memory or Memory()
    return Standing(scenario, Effect(scenario, memory), memory)


def ended(epoch: int, *, loss: float = 1.0, score: float | None = None) -> EpochEnded:
    tally = Tally(epoch, 2)
    tally.add(0, Work(epoch, 4, 32, losses=(32 * loss, 32)))
    metrics = tally.result(100.0, 10, 4, None)
    return EpochEnded(metrics if score is None else replace(metrics, eval={"score": score}))


def record(global_step: int) -> RoundEnded:
    zeros = (0.0, 0.0)
    return RoundEnded(0, 1, 0, global_step, (0, 0), (0, 0), 1.0, 0.1, 1.0, zeros, zeros, zeros, 0.0, 10)


def outcome(**fields: Any) -> Outcome:
    return Outcome(
        **{"round": 0, "global_step": 0, "members": (0, 1), "steps": (0, 0), "samples": (0, 0), **fields}
    )


def captured(standing: Standing, number: int = 0) -> None:
    for rank in (0, 1):
        standing.ordered(rank, SaveState(number), "")
    for rank in (0, 1):
        standing.answered(StateSaved(rank))


def save(version: int | None = 1, *, snapshots: int = 0, is_best: bool = False, **position: Any) -> Save:
    stands = Position(2, **{"versions": version or 0, "round": 9, **position})
    return Save(0, stands, version, snapshots, is_best=is_best)


def somebody_stirs(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "rank 1 is at step")


def two_tasks(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.ordered(1, SaveState(1), "")


def a_step_in_a_task(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.moves(1, "begins (0, 0)")


def an_order_in_a_task(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.told(1, "gets an order")


def saved_too_early(standing: Standing) -> None:
    standing.ordered(0, SaveState(0), "")
    standing.saved(save(), 0.0)


def another_capture(standing: Standing) -> None:
    captured(standing, 1)
    standing.saved(save(), 0.0)


def epochs_that_are_not_over(standing: Standing) -> None:
    captured(standing)
    standing.ended(ended(0))
    standing.saved(save(), 0.0)


def rounds_that_were_held(standing: Standing) -> None:
    standing.met(outcome(round=9))
    captured(standing)
    standing.saved(save(), 0.0)


def another_best(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(best=Best(1.0, 0)), 0.0)


def a_version_twice(standing: Standing) -> None:
    for version in (1, 1):
        captured(standing)
        standing.saved(save(version), 0.0)


def a_snapshot_counts_as_a_checkpoint(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(None, versions=1), 0.0)


def too_many_answers(standing: Standing) -> None:
    captured(standing)
    standing.saved(save(snapshots=1), 0.0)


def bad_and_weighs(standing: Standing) -> None:
    standing.goes_bad(1)
    standing.met(outcome(samples=(8, 8), bad=(1,)))


def bad_and_not_said(standing: Standing) -> None:
    standing.goes_bad(1)
    standing.met(outcome(samples=(8, 0)))


def sound_and_said(standing: Standing) -> None:
    standing.met(outcome(samples=(8, 0), bad=(1,)))


def bad_and_goes_on(standing: Standing) -> None:
    standing.goes_bad(1)
    standing.met(outcome(bad=(1,)))
    standing.moves(1, "begins (0, 0)")


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


def late_and_never_said(standing: Standing) -> None:
    standing.goes_bad(1, is_late=True)
    for _ in range(2):
        standing.met(outcome(samples=(8, 8)))


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


def a_bad_snapshot_weighs(standing: Standing) -> None:
    standing.goes_bad(0)
    standing.snapped(0, 3, 8)


def a_bad_snapshot_is_averaged(standing: Standing) -> None:
    standing.goes_bad(0)
    standing.snapped(0, 3, 0)
    standing.averages(4)
    standing.averages(3)


def a_wish_is_not_fulfilled(standing: Standing) -> None:
    standing.wishes("checkpoint")
    for _ in range(4):
        standing.reported(record(0), 0.0)


def a_snapshot_is_not_taken(standing: Standing) -> None:
    standing.wishes("snapshot")
    standing.over(Finish(None, False, 0, 0))


BROKEN: list[tuple[str, Callable[[Standing], None]]] = [
    ("S18", somebody_stirs),
    ("S18", two_tasks),
    ("S18", a_step_in_a_task),
    ("S18", an_order_in_a_task),
    ("S18", saved_too_early),
    ("S18", another_capture),
    ("S19", epochs_that_are_not_over),
    ("S19", rounds_that_were_held),
    ("S19", another_best),
    ("S23", a_version_twice),
    ("S23", a_snapshot_counts_as_a_checkpoint),
    ("S12", too_many_answers),
    ("S21", bad_and_weighs),
    ("S21", bad_and_not_said),
    ("S21", sound_and_said),
    ("S21", bad_and_goes_on),
    ("S21", late_and_said_at_once),
    ("S21", late_and_never_said),
    ("S21", heard_and_told_to_go_on),
    ("S21", sound_and_heard),
    ("S21", captures_a_bad_one),
    ("S21", adopts_from_a_bad_one),
    ("S21", a_sound_one_adopts),
    ("S21", a_bad_snapshot_weighs),
    ("S21", a_bad_snapshot_is_averaged),
    ("L6", a_wish_is_not_fulfilled),
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
    standing.answered(StateSaved(1))
    standing.healed(1)
    standing.moves(1, "begins (0, 0)")
    captured(standing)
    standing.saved(save(snapshots=1), 0.0)
    standing.moves(0, "begins (0, 1)")
    standing.over(Finish(None, True, 0, 0))
    assert [kept.version for kept, _ in standing.saves] == [1]


def test_who_has_left_owes_nothing() -> None:
    standing = judge()
    for rank in (0, 1):
        standing.ordered(rank, SaveState(0), "")
        standing.is_gone(rank)
    standing.moves(0, "begins (0, 0)")


def test_in_exact_a_bad_gradient_is_left_out_and_forgotten() -> None:
    standing = judge(policy="exact", global_batch=GlobalBatch(4, 16))
    standing.goes_bad(1)
    standing.met(outcome(samples=(8, 0), bad=(1,)))
    standing.moves(1, "begins (0, 1)")
    standing.met(outcome(round=1, samples=(8, 8)))


# ---------------------------------------------------------------- evaluations
EVALUATES = BarrierPlan(eval_every=2)


def evaluated(standing: Standing) -> None:
    standing.ordered(0, Evaluate(1, 0), "")
    standing.evaluated((0, 6, (("score", 2.0),)))
    standing.evaluated((1, 2, (("score", 4.0),)))


def test_an_epoch_comes_with_its_evaluation() -> None:
    standing = judge(EVALUATES)
    standing.ended(ended(0))
    evaluated(standing)
    standing.ended(ended(1, score=2.5))
    standing.ended(ended(2))


@pytest.mark.parametrize("score", [None, 2.0])
def test_an_epoch_without_its_evaluation(score: float | None) -> None:
    standing = judge(EVALUATES)
    evaluated(standing)
    with pytest.raises(Violation, match=r"^S22: "):
        standing.ended(ended(1, score=score))


def test_an_evaluation_with_batches_twice_or_not_at_all() -> None:
    standing = judge(EVALUATES)
    standing.ordered(0, Evaluate(1, 0), "")
    standing.evaluated((0, 6, (("score", 2.0),)))
    with pytest.raises(Violation, match=r"^S22: .* comes twice"):
        standing.evaluated((0, 6, (("score", 2.0),)))
    with pytest.raises(Violation, match=r"^S22: "):
        standing.ended(ended(1, score=2.0))


def test_evaluations_that_nobody_wants() -> None:
    standing = judge(EVALUATES)
    with pytest.raises(Violation, match=r"^S22: .* is not due"):
        standing.ordered(0, Evaluate(0, 0), "")
    standing = judge(EVALUATES)
    standing.is_stopped = True
    with pytest.raises(Violation, match=r"^S22: .* is not due"):
        standing.ordered(0, Evaluate(1, 0), "")
    with pytest.raises(Violation, match=r"^S22: "):
        standing.ended(ended(1, score=2.0))  # it was to be cut short
    with pytest.raises(Violation, match=r"^S22: .* owes an evaluation: True"):
        standing.ended(ended(1))
    standing.ended(owed(1))


def owed(epoch: int) -> EpochEnded:
    return EpochEnded(replace(ended(epoch).metrics, owes_evaluation=True))


def test_a_position_that_does_not_say_what_a_stop_has_taken() -> None:
    standing = judge(EVALUATES)
    standing.is_stopped = True
    standing.ended(owed(1))
    standing._judge_owed(Position(2, 2, owed_epoch=owed(1).metrics))
    standing._judge_owed(Position(2, 1))  # the epoch was cut short by `max_steps`, and is reported again
    for position in (Position(2, 2), Position(2, 2, owed_step=True)):
        with pytest.raises(Violation, match=r"^S22: .* is owed"):
            standing._judge_owed(position)


def test_an_owed_evaluation_comes_first() -> None:
    memory = Memory(epochs=2, owed_epoch=owed(1).metrics)
    standing = judge(EVALUATES, memory)
    with pytest.raises(Violation, match=r"^S22: .* before the evaluation"):
        standing.reported(record(9), 0.0)
    evaluated(standing)
    with pytest.raises(Violation, match=r"^S22: .* is reported again as"):
        standing.ended(ended(1, loss=2.0, score=2.5))
    standing = judge(EVALUATES, memory)
    evaluated(standing)
    standing.ended(ended(1, score=2.5))
    standing.reported(record(9), 0.0)


def test_an_owed_evaluation_by_steps_comes_first() -> None:
    standing = judge(BarrierPlan(eval_every=10, eval_unit="step"), Memory(owed_step=True))
    with pytest.raises(Violation, match=r"^S22: .* before the evaluation"):
        standing.reported(record(9), 0.0)
    standing.ordered(0, Evaluate(0, 0, 0), "")
    with pytest.raises(Violation, match=r"^S22: .* is not due"):
        judge(BarrierPlan(eval_every=10, eval_unit="step")).ordered(0, Evaluate(0, 0, 0), "")


# ---------------------------------------------------------------- what is due
def rounds_until_it_is_late(standing: Standing, *global_steps: int, now_ms: float = 0.0) -> int:
    """How many of these rounds end before a checkpoint is missed."""
    sound = 0
    with contextlib.suppress(Violation):
        for global_step in global_steps:
            standing.reported(record(global_step), now_ms)
            sound += 1
    return sound


def test_a_checkpoint_by_steps_is_late_a_few_rounds_behind_its_multiple() -> None:
    assert rounds_until_it_is_late(judge(BarrierPlan(SavePlan(10, "step"))), 9, 10, 11, 12, 13, 14) == 5
    memory = Memory(global_step=15)
    assert rounds_until_it_is_late(judge(BarrierPlan(SavePlan(10, "step")), memory), 16, 17, 18, 19, 19) == 5


def test_a_checkpoint_by_the_clock() -> None:
    standing = judge(BarrierPlan(SavePlan(1, "minute")))
    standing.begins(5.0)
    assert rounds_until_it_is_late(standing, *range(1, 9), now_ms=MINUTE_MS) == 8
    assert rounds_until_it_is_late(standing, *range(9, 19), now_ms=MINUTE_MS + 5.0) == 4


def test_a_checkpoint_after_an_epoch() -> None:
    standing = judge(BarrierPlan(SavePlan(2, "epoch")))
    standing.ended(ended(0))
    assert rounds_until_it_is_late(standing, 1, 2, 3, 4, 5) == 5
    standing.ended(ended(1))
    assert rounds_until_it_is_late(standing, 6, 7, 8, 9, 10) == 3


def test_a_run_that_ends_well_is_saved_at_its_end() -> None:
    standing = judge(BarrierPlan(SavePlan(100, "step")))
    with pytest.raises(Violation, match=r"^S23: "):
        standing.over(Finish(None, False, 0, 0))
    standing.over(Finish("rank 1 failed", False, 0, 0))
    captured(standing)
    standing.saved(save(), 0.0)
    standing.over(Finish(None, False, 0, 0))


# ---------------------------------------------------------------- the best, and enough of it
WATCHES = BarrierPlan(monitor=Monitor("loss", "min", patience=2, min_delta=0.1), keeps_best=True)


def test_it_is_enough_when_it_does_not_get_better() -> None:
    standing = judge(WATCHES)
    for epoch, (loss, is_enough) in enumerate([(2.0, False), (1.0, False), (0.95, False), (1.0, True)]):
        standing.ended(ended(epoch, loss=loss))
        assert standing.is_enough == is_enough
    with pytest.raises(Violation, match=r"^S24: "):
        standing.ended(ended(4))
    assert judge(WATCHES, Memory(best=Best(1.0, 0, 2))).is_enough


@pytest.mark.parametrize(("losses", "is_best"), [((2.0, 1.0), True), ((1.0, 2.0), False)])
def test_the_best_epoch_is_saved_as_that(losses: tuple[float, float], is_best: bool) -> None:
    for claims in (True, False):
        standing = judge(WATCHES)
        for epoch, loss in enumerate(losses):
            standing.ended(ended(epoch, loss=loss))
        captured(standing)
        best = Best(1.0, 1) if is_best else Best(1.0, 0, 1)
        saved = save(None, is_best=claims, done=2, best=best)
        standing._effect.trained.update((epoch, batch) for epoch in (0, 1) for batch in range(4))
        if claims == is_best:
            standing.saved(saved, 0.0)
        else:
            with pytest.raises(Violation, match=r"^S24: "):
                standing.saved(saved, 0.0)


def test_an_epoch_that_was_cut_is_none_of_those_that_are_over() -> None:
    standing = judge(WATCHES, max_steps=2)
    standing.ended(ended(0))
    captured(standing)
    standing._effect.trained.update({(0, 0): 1, (0, 1): 1})
    cut = OpenEpoch(0, 2, ((), ()), (RankSums(samples=16), RankSums()))
    standing.saved(save(None, is_best=True, open=(cut,)), 0.0)
    [(_, memory)] = standing.saves
    assert (memory.epochs, memory.best) == (0, Best())
