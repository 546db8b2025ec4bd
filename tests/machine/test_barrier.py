"""Tests of barriers: due tasks, their order, and their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.barrier import Barrier
from flowdp.machine.config import BarrierPlan, CoordinatorConfig
from flowdp.policy.interval import MINUTE_MS, Interval, SaveCost
from flowdp.policy.monitor import Best, Monitor
from flowdp.policy.tally import EpochMetrics, MetricArray, Tally, Work
from flowdp.protocol.commands import (
    Command,
    CutEvaluation,
    EvaluationEnded,
    Fail,
    Save,
    SavesPutOff,
    Send,
)
from flowdp.protocol.messages import (
    CopyReplica,
    Evaluate,
    SaveState,
    Settle,
    TaskDone,
)
from flowdp.protocol.position import Position

EVALUATES = BarrierPlan(evaluation=Interval(2, "epoch"))


def metrics(epoch: int, loss: float = 1.0) -> EpochMetrics:
    tally = Tally(epoch, 2)
    tally.add(0, Work(epoch, 4, 32, losses=(32 * loss, 32)))
    return tally.result(100.0, 10, 4, None)


def barrier_of(tasks: BarrierPlan, ranks: int = 2, **given: Any) -> Barrier:
    return Barrier(CoordinatorConfig(world_size=ranks, batches=10, tasks=tasks, **given))


class Still:
    """Two ranks at a barrier, at a global step."""

    def __init__(self, tasks: BarrierPlan, position: Position | None = None) -> None:
        self.barrier = barrier_of(tasks, start=position)
        self.barrier.saves.begin(0.0, 0)
        self.now_ms = 0.0
        self.global_step = 0
        self.done = 0

    def decide(self, *, leaves: bool = False) -> list[Command]:
        return self.barrier.decide(self.now_ms, [0, 1], self.stand, leaves=leaves)

    def stand(self) -> Position:
        barrier = self.barrier
        return Position(
            2, self.done, (), self.global_step, versions=barrier.versions, best=barrier.best(self.done)
        )

    def answers(self, *fields: Any, leaves: bool = False) -> list[Command]:
        """Both ranks answer; returns the results."""
        self.barrier.take(TaskDone(0, *fields))
        assert self.decide(leaves=leaves) == []  # one more answer is awaited
        self.barrier.take(TaskDone(1, *fields))
        return self.decide(leaves=leaves)

    def captures(self, commands: list[Command]) -> Save:
        """A capture is requested and done."""
        asked = [command.order for command in commands if isinstance(command, Send)]
        assert [type(order) for order in asked] == [SaveState, SaveState]
        [save] = self.answers()
        assert isinstance(save, Save)
        # Ranks of other machines know from the order alone whether they keep the model.
        assert {order.is_best for order in asked if isinstance(order, SaveState)} == {save.is_best}
        return save

    def ends(self, epoch: int, loss: float = 1.0) -> list[Command]:
        """An epoch is complete."""
        self.done = epoch + 1
        return self.barrier.ended(metrics(epoch, loss))


# ---------------------------------------------------------------- epochs
def test_an_epoch_without_duties_is_reported_at_once() -> None:
    still = Still(EVALUATES)
    assert still.ends(0) == [metrics(0)]
    assert not still.barrier.is_wanted


def test_an_epoch_is_reported_with_its_evaluation() -> None:
    still = Still(EVALUATES)
    assert still.ends(1) == []
    assert still.barrier.is_wanted
    assert still.decide() == [Send(rank, Evaluate(1, 0)) for rank in (0, 1)]
    assert still.barrier.is_asked
    still.barrier.take(TaskDone(1, ((1, 2, (("score", 4.0),)),)))
    still.barrier.take(TaskDone(0, ((0, 6, (("score", 2.0),)),)))
    [event] = still.decide()
    assert isinstance(event, EpochMetrics)
    assert event.eval == {"score": 2.5}
    assert not still.barrier.is_wanted
    assert still.ends(2) == [metrics(2)]


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_metrics_of_several_machines_are_merged_before_the_evaluation_is_reported(unit: Any) -> None:
    still = Still(BarrierPlan(evaluation=Interval(1, unit)))
    if unit == "epoch":
        still.ends(0)
    else:
        still.barrier.evaluations.begin(0.0, 0)
        still.global_step = 1
        still.barrier.look(0.0, 1)
    still.decide()
    still.barrier.take(TaskDone(1, ((1, 2, (("score", 4.0),)),), has_metrics=True))
    still.barrier.take(TaskDone(0, ((0, 6, (("score", 2.0),)),), has_metrics=True))
    # Rank 0 is on machine 0, which has the metrics of all.
    step = None if unit == "epoch" else 1
    assert still.decide() == [Send(0, Evaluate(0, 0, step, merges=True))]
    assert still.decide() == []
    array = MetricArray((2,), (1.0, 2.0))
    with pytest.raises(ProtocolError):
        still.barrier.take(TaskDone(1, ()))
    still.barrier.take(TaskDone(0, ((2, 1.0, (("f1", 0.5),)),), (("roc", array),)))
    [found] = still.decide()
    assert isinstance(found, EpochMetrics if unit == "epoch" else EvaluationEnded)
    assert found.eval == {"score": 2.5, "f1": 0.5}
    assert found.eval_arrays == {"roc": array}
    assert not still.barrier.is_wanted


def test_an_evaluation_is_cut_short_once_and_has_no_result() -> None:
    still = Still(EVALUATES)
    still.ends(1)
    still.decide()
    assert still.decide(leaves=True) == [CutEvaluation()]
    commands = still.answers(((0, 6, (("score", 2.0),)),), leaves=True)
    assert commands == [owed(1)]
    assert (still.barrier.owed_epoch, still.barrier.owes) == (owed(1), True)


# ---------------------------------------------------------------- owed evaluations
def owed(epoch: int) -> EpochMetrics:
    return replace(metrics(epoch), owes_evaluation=True)


EACH = BarrierPlan(Interval(5, "epoch"), evaluation=Interval(1, "epoch"), is_saved=True)


def test_an_owed_evaluation_comes_first_and_its_epoch_is_reported_once_more() -> None:
    still = Still(EACH, Position(2, 2, owed_epoch=owed(1)))
    assert still.barrier.is_wanted
    assert still.decide() == [Send(rank, Evaluate(1, 0)) for rank in (0, 1)]
    still.barrier.take(TaskDone(1, ()))
    still.barrier.take(TaskDone(0, ((0, 6, (("score", 2.0),)),)))
    assert still.decide() == [replace(metrics(1), eval={"score": 2.0})]
    assert not still.barrier.owes
    assert not still.barrier.is_wanted
    # The checkpoint of this step lacks the evaluation, so the last one of the run is written anew.
    assert still.barrier.end(0)


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_evaluation_by_steps_that_a_stop_has_taken_is_owed(is_begun: bool) -> None:
    by_steps = BarrierPlan(evaluation=Interval(10, "step"))
    still = Still(by_steps)
    still.barrier.begin(0.0, 0)
    still.global_step = 10
    still.barrier.look(0.0, 10)
    if is_begun:
        still.decide()
        assert still.decide(leaves=True) == [CutEvaluation()]
        assert still.answers((), leaves=True) == []
    else:
        assert still.decide(leaves=True) == []
    assert (still.barrier.owed_step, still.barrier.owes) == (True, True)
    again = Still(by_steps, Position(2, 1, global_step=10, owed_step=True))
    again.done, again.global_step = 1, 10
    again.barrier.begin(0.0, 10)
    again.barrier.look(0.0, 10)
    assert again.decide() == [Send(rank, Evaluate(1, 0, 10)) for rank in (0, 1)]
    assert again.answers(()) == [EvaluationEnded(10, 1, {})]
    assert not again.barrier.owes
    again.barrier.look(0.0, 10)
    assert not again.barrier.is_wanted
    assert again.barrier.evaluations.limit == 20


# ---------------------------------------------------------------- checkpoints
def test_a_checkpoint_after_every_second_epoch() -> None:
    still = Still(BarrierPlan(Interval(2, "epoch")))
    assert still.ends(0) == [metrics(0)]
    still.global_step = 8
    assert still.ends(1) == []
    reported, *rest = still.decide()
    assert reported == metrics(1)
    assert still.captures(rest) == Save(0, Position(2, 2, (), 8, versions=1), 1, 0)
    # It is also the run's last one, if the run ends here.
    assert not still.barrier.end(8)
    assert still.barrier.end(9)


def test_checkpoints_by_steps_lie_behind_their_multiples() -> None:
    still = Still(BarrierPlan(Interval(10, "step")))
    assert still.barrier.saves.limit == 10
    for step, is_due in ((9, False), (10, True)):
        still.barrier.look(0.0, step)
        assert still.barrier.is_wanted == is_due
    still.global_step = 23  # a round is not cut
    assert still.captures(still.decide()).version == 1
    assert still.barrier.saves.limit == 30
    assert Still(BarrierPlan(Interval(1, "epoch"))).barrier.saves.limit is None


def test_checkpoints_by_the_clock() -> None:
    still = Still(BarrierPlan(Interval(0.5, "minute")))
    assert still.barrier.saves.deadline_ms == 0.5 * MINUTE_MS
    still.barrier.look(0.4 * MINUTE_MS, 5)
    assert not still.barrier.is_wanted
    still.barrier.look(0.6 * MINUTE_MS, 5)
    assert still.barrier.is_wanted
    assert still.barrier.saves.deadline_ms is None  # it has passed, and must not wake the coordinator again
    still.now_ms, still.global_step = 0.7 * MINUTE_MS, 8
    still.captures(still.decide())
    still.barrier.written(1, still.now_ms)
    assert still.barrier.saves.deadline_ms == 1.2 * MINUTE_MS
    # Nothing was trained since: it waits for the first round.
    still.barrier.look(2.0 * MINUTE_MS, 8)
    assert not still.barrier.is_wanted
    still.barrier.look(2.1 * MINUTE_MS, 9)
    assert still.barrier.is_wanted


def test_a_long_epoch_has_checkpoints_between_those_of_the_plan() -> None:
    still = Still(BarrierPlan(Interval(1, "epoch", 10.0)))
    assert still.barrier.saves.deadline_ms == 10 * MINUTE_MS
    still.barrier.look(9.9 * MINUTE_MS, 5)
    assert not still.barrier.is_wanted
    still.barrier.look(10 * MINUTE_MS, 5)
    still.now_ms, still.global_step = 10 * MINUTE_MS, 5
    assert still.captures(still.decide()).is_between
    still.barrier.written(1, still.now_ms)
    # The epoch's own is one of the plan, and the next one between counts from there.
    still.now_ms, still.global_step = 15 * MINUTE_MS, 8
    assert still.ends(0) == []
    assert not still.captures(still.decide()[1:]).is_between
    assert still.barrier.saves.deadline_ms == 25 * MINUTE_MS


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_requested_checkpoint_stays_though_one_between_is_due(comes_first: bool) -> None:
    still = Still(BarrierPlan(Interval(1, "epoch", 10.0)))
    still.now_ms, still.global_step = 10 * MINUTE_MS, 5
    if comes_first:
        still.barrier.look(still.now_ms, 5)
    still.barrier.saves.ask()
    still.barrier.look(still.now_ms, 5)
    assert not still.captures(still.decide()).is_between
    by_the_clock = Still(BarrierPlan(Interval(10, "minute")))
    by_the_clock.now_ms, by_the_clock.global_step = 10 * MINUTE_MS, 5
    by_the_clock.barrier.look(by_the_clock.now_ms, 5)
    assert not by_the_clock.captures(by_the_clock.decide()).is_between


def test_one_between_that_is_put_off_is_named_by_its_own_limit() -> None:
    assert "checkpoints of max_minutes=10 are put off" in str(
        SavesPutOff(Interval(1, "epoch", 10.0), SaveCost(10.0, 20.0))
    )


def test_a_checkpoint_is_put_off_until_the_one_before_is_written_and_paid_for() -> None:
    still = Still(BarrierPlan(Interval(1, "step")))
    still.barrier.look(0.0, 1)
    still.global_step = 1
    still.captures(still.decide())
    assert still.barrier.look(10.0, 2) == []
    assert not still.barrier.is_wanted  # it is being written
    assert still.barrier.saves.limit is None  # and rounds are not cut for one that will be put off
    assert still.barrier.saves.deadline_ms is None
    still.barrier.written(1, 30.0)
    [told] = still.barrier.look(30.0, 3)
    assert still.barrier.saves.deadline_ms == 600.0  # all 30 ms may have been lost
    assert isinstance(told, SavesPutOff)
    assert "more than 5%" in str(told)
    assert "after 600ms." in str(told)
    assert still.barrier.look(599.0, 4) == []  # once
    assert not still.barrier.is_wanted
    still.barrier.look(600.0, 4)
    assert still.barrier.is_wanted


def test_requested_and_last_checkpoints_and_those_of_epochs_are_not_put_off() -> None:
    still = Still(BarrierPlan(Interval(1, "step")))
    for version in (1, 2):
        still.global_step = version
        still.barrier.saves.ask()
        assert still.captures(still.decide()).version == version
    assert still.barrier.end(3)
    assert still.captures(still.decide()).version == 3
    still = Still(BarrierPlan(Interval(1, "epoch")))
    for epoch in (0, 1):
        still.ends(epoch)
        still.global_step += 1
        _, *asked = still.decide()
        assert still.captures(asked).version == epoch + 1


def test_wishes_are_answered_by_what_is_captured_after_them() -> None:
    still = Still(BarrierPlan())
    still.barrier.wish_snapshot()
    still.barrier.wish_snapshot()
    commands = still.decide()
    still.barrier.wish_snapshot()  # it may be too late for the captured state
    still.barrier.take(TaskDone(0))
    still.barrier.take(TaskDone(1))
    save, *again = still.decide()
    assert isinstance(save, Save)
    assert (save.snapshots, save.version, save.capture) == (2, None, 0)
    assert commands != again
    assert still.captures(again).snapshots == 3
    still.barrier.saves.ask()
    save = still.captures(still.decide())
    assert (save.snapshots, save.version) == (3, 1)
    assert not still.barrier.is_wanted


def test_the_ranks_that_are_there_capture_and_the_first_of_them_the_model() -> None:
    still = Still(BarrierPlan())
    still.barrier.saves.ask()
    commands = still.barrier.decide(0.0, [1, 3], still.stand, leaves=False)
    assert commands == [Send(rank, SaveState(0, model=1)) for rank in (1, 3)]


def test_an_epoch_that_ends_meanwhile_comes_before_the_checkpoint() -> None:
    """The end of a stream may be read during the barrier."""
    still = Still(BarrierPlan(Interval(1, "epoch"), evaluation=Interval(1, "epoch")))
    still.barrier.wish_snapshot()
    still.decide()
    still.ends(0)
    commands = still.answers()
    assert commands == [Send(rank, Evaluate(0, 0)) for rank in (0, 1)]
    reported, *rest = still.answers(())
    assert isinstance(reported, EpochMetrics)
    save = still.captures(rest)
    assert (save.capture, save.version, save.snapshots, save.position.done) == (1, 1, 1, 1)


# ---------------------------------------------------------------- NaN or inf parameters
def test_a_replica_is_healed_before_anything_else() -> None:
    still = Still(EVALUATES)
    still.ends(1)
    still.barrier.bad = dict.fromkeys((0,))
    assert still.decide() == [Send(0, CopyReplica(donor=1))]
    still.barrier.take(TaskDone(0))
    assert still.decide() == [Send(rank, Evaluate(1, 0)) for rank in (0, 1)]


# ---------------------------------------------------------------- the best state, and early stopping
WATCHES = BarrierPlan(monitor=Monitor("loss", "min", patience=2), keeps_best=True)


def test_the_best_epoch_is_captured() -> None:
    still = Still(WATCHES)
    for epoch, (loss, is_best) in enumerate([(3.0, True), (2.0, True), (2.5, False)]):
        still.ends(epoch, loss)
        reported, *rest = still.decide()
        assert isinstance(reported, EpochMetrics)
        assert bool(rest) == is_best
        if is_best:
            save = still.captures(rest)
            assert (save.is_best, save.version, save.position.best) == (True, None, Best(loss, epoch))
        assert not still.barrier.is_enough
    still.ends(3, 2.1)
    still.decide()
    assert still.barrier.is_enough
    assert barrier_of(WATCHES, start=still.stand()).is_enough  # nor does a run resumed from there


def test_an_epoch_that_was_cut_short_is_judged_when_it_is_whole() -> None:
    still = Still(WATCHES)
    still.ends(0, 1.0)
    still.captures(still.decide()[1:])
    still.ends(1, 2.0)
    still.decide()
    assert still.barrier.best(2) == Best(1.0, 0, 1)
    assert still.barrier.best(1) == Best(1.0, 0)
    assert still.barrier.best(0) == Best()  # of equal ones, the first counts


def test_a_monitor_that_watches_nothing_ends_the_run_before_anything_else() -> None:
    still = Still(BarrierPlan(Interval(1, "epoch"), monitor=Monitor("recall", "max")))
    still.ends(0)
    reported, failure = still.decide()
    assert isinstance(reported, EpochMetrics)
    assert isinstance(failure, Fail)
    assert failure.kind == "option"
    assert "recall" in failure.error


@pytest.mark.parametrize("every", [1, 5])
def test_a_name_that_keep_best_has_and_nothing_else_ends_the_run(every: int) -> None:
    still = Still(BarrierPlan(Interval(every, "epoch"), keep_best=Monitor("recall", "max")))
    reported, failure = [*still.ends(0), *still.decide()]
    assert isinstance(reported, EpochMetrics)
    assert isinstance(failure, Fail)
    assert failure.error.startswith("keep_best: nothing in epoch 1 is called 'recall'")
    known = Still(BarrierPlan(Interval(every, "epoch"), keep_best=Monitor("loss", "min")))
    assert not any(isinstance(command, Fail) for command in [*known.ends(0), *known.decide()])


# ---------------------------------------------------------------- several machines
def of_machines(overlaps: bool = False) -> Barrier:
    """Two machines of two ranks each."""
    return barrier_of(EVALUATES, 4, machines=(2, 2), overlaps=overlaps)


def decided(barrier: Barrier) -> list[Command]:
    return barrier.decide(0.0, [0, 1, 2, 3], lambda: Position(4), leaves=False)


def test_a_replica_is_healed_by_one_of_its_own_machine() -> None:
    barrier = of_machines()
    barrier.bad = dict.fromkeys((0, 3))
    assert decided(barrier) == [Send(0, CopyReplica(1))]
    barrier.take(TaskDone(0))
    assert decided(barrier) == [Send(3, CopyReplica(2))]
    barrier.take(TaskDone(3))
    assert decided(barrier) == []
    assert not barrier.is_wanted


def test_a_machine_without_a_healthy_replica_gets_one_from_another() -> None:
    barrier = of_machines()
    barrier.bad = dict.fromkeys((0, 2, 3))
    assert decided(barrier) == [Send(0, CopyReplica(1))]
    barrier.take(TaskDone(0))
    both = CopyReplica(0, receiver=2)
    assert decided(barrier) == [Send(0, both), Send(2, both)]
    barrier.take(TaskDone(2))
    assert decided(barrier) == []
    barrier.take(TaskDone(0))
    assert decided(barrier) == [Send(3, CopyReplica(2))]


def test_a_mean_on_its_way_is_brought_in_before_anything_else() -> None:
    barrier = of_machines(overlaps=True)
    barrier.bad = dict.fromkeys((0,))
    barrier.trained()
    assert decided(barrier) == [Send(rank, Settle()) for rank in range(4)]
    for rank in range(4):
        barrier.take(TaskDone(rank))
    assert decided(barrier) == [Send(0, CopyReplica(1))]
    barrier.take(TaskDone(0))
    # Nothing was trained since.
    barrier.bad = dict.fromkeys((1,))
    assert decided(barrier) == [Send(1, CopyReplica(0))]
