"""Tests of the coordinator: commands for given facts and requests."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from flowdp.machine.config import BarrierPlan, CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.worker import WorkerMachine
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.interval import Interval
from flowdp.policy.tally import Tally
from flowdp.protocol.commands import (
    AbortGate,
    Command,
    CutEvaluation,
    EpochMetrics,
    EpochStarted,
    Fail,
    Finish,
    LeaveGate,
    Paused,
    Quarantined,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.gate import GateState, Window
from flowdp.protocol.messages import (
    Checksum,
    CopyReplica,
    DataEnded,
    Directives,
    Evaluate,
    Exiting,
    Failed,
    Leave,
    Outcome,
    Requested,
    SaveState,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    TaskDone,
    Tick,
    Work,
    WorkerReady,
)
from flowdp.sim.world import VirtualRank, World
from tests.invariants import check
from tests.planned import sync_now
from tests.simulator.positions import check_position

RATE = Requested("set_lr", 0.1)


def coordinator(policy: Policy = "cadence", **given: Any) -> Coordinator:
    return Coordinator(
        CoordinatorConfig(**{"world_size": 2, "batches": 12, "epochs": 1, "policy": policy, **given})
    )


def started(policy: Policy = "cadence", **given: Any) -> tuple[Coordinator, list[Command]]:
    machine = coordinator(policy, **given)
    assert machine.handle(WorkerReady(1), 0.0) == []
    assert machine.phase is Phase.STARTING
    commands = machine.handle(WorkerReady(0), 0.0)
    assert machine.phase is Phase.RUNNING
    return machine, commands


def orders(commands: list[Command]) -> dict[int, StartEpoch]:
    """The first order of each rank among the commands."""
    found: dict[int, StartEpoch] = {}
    for command in commands:
        if isinstance(command, Send) and isinstance(command.order, StartEpoch):
            found.setdefault(command.rank, command.order)
    return found


def others(commands: list[Command]) -> list[Command]:
    """Commands that are neither training orders nor records."""
    return [
        c
        for c in commands
        if not (
            isinstance(c, (RoundEnded, EpochMetrics))
            or (isinstance(c, Send) and isinstance(c.order, StartEpoch))
        )
    ]


def meet(
    machine: Coordinator,
    block: dict[int, StartEpoch],
    steps: tuple[int, ...] | None = None,
    late: tuple[int, ...] = (),
    **wishes: Any,
) -> list[Command]:
    """All ranks acknowledge that the block has ended so."""
    first = block[0].sync
    assert first is not None
    done = steps or tuple(len(order.batches) for order in block.values())
    outcome = Outcome(
        first.round + first.count - 1,
        first.global_step + sum(done),
        tuple(block),
        done,
        tuple(8 * n for n in done),
        **wishes,
    )
    commands: list[Command] = []
    for rank, order in block.items():
        work = Work(order.epoch, done[rank], 8 * done[rank], busy_ms=done[rank] * 10.0, pace_ms=10.0)
        work = replace(work, bad=(0, 7) if rank in late else None)
        commands += machine.handle(SyncAck(rank, outcome, work, 1.0), 100.0)
        check(machine)
    return commands


def end(commands: list[Command]) -> tuple[bool, int, int]:
    """End of a run without an error: whether it was stopped, its steps and complete epochs."""
    [finish] = commands
    assert isinstance(finish, Finish)
    assert finish.error is None
    assert finish.position is not None
    check_position(finish.position)
    assert finish.position.global_step == finish.global_step
    return finish.stopped, finish.global_step, finish.epochs_done


def finish_of(machine: Coordinator) -> Finish:
    """The end, once both ranks have left."""
    machine.handle(Exiting(0), 200.0)
    [finish] = machine.handle(Exiting(1), 200.0)
    assert isinstance(finish, Finish)
    return finish


def test_the_end_says_why() -> None:
    machine, commands = started(batches=6)
    meet(machine, orders(commands))
    ended = finish_of(machine)
    assert (ended.reason, ended.is_planned, ended.stopped) == ("all epochs are trained", True, False)
    assert str(ended) == "ended after 1 epoch, step 6: all epochs are trained"
    machine, commands = started(batches=6, epochs=None, max_steps=6)
    meet(machine, orders(commands))
    assert finish_of(machine).reason == "max_steps=6 reached"


@pytest.mark.parametrize("cause", [None, "Ctrl-C", "SIGTERM"])
def test_the_end_says_who_has_stopped_it(cause: str | None) -> None:
    machine, out = started()
    machine.handle(Requested("stop", cause), 5.0)
    machine.handle(Requested("stop", "another"), 5.0)
    meet(machine, orders(out), steps=(1, 1), hurried=True, stop=True)
    ended = finish_of(machine)
    assert ended.reason == (cause or "run.stop()")
    assert str(ended) == f"stopped after 0 epochs, step {ended.global_step}: {ended.reason}"


def test_nothing_begins_before_all_ranks_stand() -> None:
    _machine, commands = started()
    assert set(orders(commands)) == {0, 1}
    assert others(commands) == [EpochStarted(0)]
    assert commands[0] == EpochStarted(0)  # before any order


def test_a_run_ends_when_nothing_is_left() -> None:
    machine, commands = started(batches=6)
    # The only round is trained: the epoch is reported, and all ranks may leave.
    commands = meet(machine, orders(commands))
    assert [type(c) for c in commands] == [RoundEnded, EpochMetrics, Send, Send]
    assert others(commands) == [Send(0, Leave()), Send(1, Leave())]
    assert machine.phase is Phase.LEAVING
    # The run is over when the last rank has exited.
    assert machine.handle(Exiting(0), 101.0) == []
    assert end(machine.handle(Exiting(1), 102.0)) == (False, 6, 1)
    assert machine.phase is Phase.DONE
    check(machine)


def test_a_stop_is_told_at_the_gate_and_ends_the_run() -> None:
    machine, commands = started()
    assert others(machine.handle(Requested("stop"), 5.0)) == [Directives(stop=True), *sync_now(0)]
    # The second request has no effect.
    assert machine.handle(Requested("stop"), 6.0) == []
    commands = meet(machine, orders(commands), (1, 0), stop=True, hurried=True)
    assert others(commands) == [Send(0, Leave()), Send(1, Leave())]
    machine.handle(Exiting(0), 1.0)
    assert end(machine.handle(Exiting(1), 1.0)) == (True, 1, 0)


def test_a_pause_stands_still_after_the_round_and_goes_on_from_there() -> None:
    machine, commands = started()
    assert others(machine.handle(Requested("pause"), 5.0)) == [Directives(pause=True), *sync_now(0)]
    commands = meet(machine, orders(commands), (2, 1), pause=True, hurried=True)
    # All ranks are paused, and the first round after the pause must not pause again.
    assert others(commands) == [Paused(True), Directives()]
    assert orders(commands) == {}
    assert machine.deadline_ms() is None
    # During the pause nothing happens by itself.
    assert machine.handle(Tick(), 200.0) == []
    assert machine.handle(Requested("pause"), 201.0) == []
    # The remaining batches are dealt first.
    commands = machine.handle(Requested("unpause"), 300.0)
    assert others(commands) == [Paused(False)]
    assert sum(len(order.batches) for order in orders(commands).values()) > 0


def test_a_learning_rate_is_told_once() -> None:
    machine, _ = started("sync", batches=100)
    assert machine.handle(RATE, 5.0) == [Directives(lr=(RATE,))]
    # An outcome may have delivered it in the middle of a block, without an acknowledgment; the next request
    # must not repeat it.
    assert machine.handle(Requested("pause"), 6.0) == [Directives(pause=True)]
    # The same rate, requested again, is a new request.
    assert machine.handle(RATE, 7.0) == [Directives(pause=True, lr=(RATE,))]


def test_a_learning_rate_behind_the_last_round_goes_to_the_gate_at_the_end() -> None:
    machine, commands = started(batches=6)
    meet(machine, orders(commands))
    assert machine.phase is Phase.LEAVING
    machine.handle(Exiting(0), 200.0)
    assert machine.handle(RATE, 200.0) == []
    told, finish = machine.handle(Exiting(1), 200.0)
    assert told == Directives(lr=(RATE,))
    assert isinstance(finish, Finish)


def test_a_learning_rate_calls_one_meeting_under_async() -> None:
    machine, commands = started("async", batches=100)
    commands = machine.handle(RATE, 5.0)
    assert others(commands) == [Directives(lr=(RATE,)), *sync_now(0)]
    order = StartEpoch
    # The meeting is over; none is due.
    outcome = Outcome(0, 0, (0, 1), (0, 0), (0, 0), lr=(RATE,), hurried=True)
    machine.handle(SyncAck(0, outcome, Work(0, 0, 0)), 6.0)
    commands = machine.handle(SyncAck(1, outcome, Work(0, 0, 0)), 6.0)
    assert others(commands) == []
    assert all(isinstance(o, order) and o.sync is None for o in orders(commands).values())


def test_a_failure_frees_everybody() -> None:
    machine, _ = started()
    assert machine.handle(Exiting(1, "rank 1 failed"), 5.0) == [
        AbortGate("rank 1 failed"),
        Send(0, Leave("rank 1 failed")),
    ]
    assert machine.phase is Phase.FAILING
    # Messages sent before rank 0 knew of it are dropped, and so is a request.
    assert machine.handle(SnapshotReady(0, 0, 1, 8), 5.5) == []
    assert machine.handle(Requested("stop"), 5.6) == []
    assert machine.deadline_ms() is None
    # The first failure counts.
    assert machine.handle(Exiting(0, "rank 0 failed"), 6.0) == [Finish("rank 1 failed", True, 0, 0)]


def test_replicas_that_differ_end_the_run() -> None:
    machine, commands = started("exact", batches=1, global_batch=GlobalBatch(8, 8))
    outcome = Outcome(0, 1, (0, 1), (1, 1), (4, 4), window=Window(compare=True))
    work = Work(0, 1, 4, busy_ms=1.0, pace_ms=1.0)
    assert sorted(orders(commands)) == [0, 1]
    assert machine.handle(SyncAck(0, outcome, work, checksum=Checksum("a card", 1)), 1.0) == []
    commands = machine.handle(SyncAck(1, outcome, work, checksum=Checksum("a card", 2)), 1.0)
    [failure] = [command for command in commands if isinstance(command, Fail)]
    assert "rank 1 " in failure.error
    # The shell is told first; then all are released as after any failure.
    reason = failure.error
    assert commands[-3:] == [AbortGate(reason), Send(0, Leave(reason)), Send(1, Leave(reason))]
    assert commands.index(failure) < commands.index(AbortGate(reason))
    for rank in (0, 1):
        commands = machine.handle(Exiting(rank), 2.0)
    assert commands == [Finish(reason, True, 1, 0)]


def test_a_rank_that_leaves_untold_is_a_failure() -> None:
    machine, _ = started()
    commands = machine.handle(Exiting(0), 1.0)
    assert commands[0] == AbortGate("rank 0 left without being told to")


def test_the_deadline_is_that_of_the_rounds() -> None:
    machine, commands = started(batches=100)
    assert machine.deadline_ms() is None
    meet(machine, orders(commands))
    assert machine.deadline_ms() is not None
    assert machine.deadline_ms() == machine.rounds.deadline_ms()


def test_an_epoch_waits_for_the_loss_of_the_one_before() -> None:
    machine, _ = started("async", batches=2, epochs=2, wait_for_metric=True)
    # Both batches went to rank 0; it has done the first, and the next epoch waits for the loss.
    one = Work(0, 1, 8, 1.0, 0.0, 1.0, losses=(4.0, 8))
    commands = machine.handle(StepsDone(0, 0, one), 2.0)
    assert commands == []
    assert machine.handle(Tick(), 2.0) == []
    commands = machine.handle(StepsDone(0, 0, one), 3.0)
    assert [type(command) for command in commands[:1]] == [EpochMetrics]
    # The loss is there: the second epoch is dealt.
    assert (orders(commands)[0].epoch, orders(commands)[0].metrics) == (1, (0.5,))


# ---------------------------------------------------------------- epochs of unknown length


def test_the_end_of_the_data_is_passed_on_and_ends_the_run() -> None:
    machine, out = started(batches=None)
    block = orders(out)
    assert [order.batches for order in block.values()] == [(0, 2, 4), (1, 3, 5)]
    end = DataEnded(0, 5)
    assert machine.handle(end, 1.0) == [Send(1, end)]
    commands = meet(machine, block, steps=(3, 2), hurried=True)
    assert [type(c) for c in commands] == [RoundEnded, EpochMetrics, Send, Send]
    assert others(commands) == [Send(0, Leave()), Send(1, Leave())]


# ---------------------------------------------------------------- barriers
def saved(machine: Coordinator, commands: list[Command], now_ms: float = 200.0) -> tuple[Save, list[Command]]:
    """All ranks capture; returns the save, and the commands after it."""
    asked = [
        command for command in commands if isinstance(command, Send) and isinstance(command.order, SaveState)
    ]
    assert asked
    for number, command in enumerate(asked, 1):
        answer = machine.handle(TaskDone(command.rank), now_ms)
        if number < len(asked):
            assert answer == []
    save, *rest = answer
    assert isinstance(save, Save)
    return save, rest


def test_after_an_epoch_all_stand_still_for_its_evaluation() -> None:
    machine, out = started(batches=6, epochs=2, tasks=BarrierPlan(evaluation=Interval(1, "epoch")))
    commands = meet(machine, orders(out))
    assert [type(command) for command in commands] == [RoundEnded, Send, Send]  # nothing of the next epoch
    assert [c.order for c in commands if isinstance(c, Send)] == [Evaluate(0, 0)] * 2
    assert machine.handle(TaskDone(0, ((0, 2, (("loss", 0.5),)),)), 101.0) == []
    commands = machine.handle(TaskDone(1, ()), 102.0)
    assert isinstance(commands[0], EpochMetrics)
    assert commands[0].eval == {"loss": 0.5}
    assert set(orders(commands)) == {0, 1}


def test_a_checkpoint_that_is_asked_for_halts_the_ranks_at_their_next_meeting() -> None:
    machine, out = started()
    assert machine.handle(Requested("checkpoint"), 1.0) == [Directives(halt=True), *sync_now(0)]
    assert machine.handle(Requested("checkpoint"), 2.0) == []
    commands = meet(machine, orders(out), steps=(1, 2), hurried=True, halt=True)
    assert Directives() in commands
    save, rest = saved(machine, commands)
    assert (save.version, save.position.global_step) == (1, 3)
    [one] = save.position.open
    assert (one.position, one.missing) == (4, (2,))
    assert set(orders(rest)) == {0, 1}


def test_a_run_that_ends_well_is_saved_at_its_end() -> None:
    machine, out = started(batches=6, tasks=BarrierPlan(Interval(100, "step")))
    save, rest = saved(machine, meet(machine, orders(out)))
    assert (save.position.done, save.position.open) == (1, ())
    assert rest == [Send(0, Leave()), Send(1, Leave())]


def test_a_run_that_is_stopped_is_saved_where_it_stops() -> None:
    machine, out = started(tasks=BarrierPlan(Interval(1, "epoch"), evaluation=Interval(1, "epoch")))
    machine.handle(Requested("stop"), 1.0)
    save, rest = saved(machine, meet(machine, orders(out), steps=(1, 1), hurried=True, stop=True))
    assert save.position.global_step == 2
    assert rest == [Send(0, Leave()), Send(1, Leave())]


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_evaluation_that_a_stop_has_taken_is_made_by_the_next_run(is_begun: bool, epochs: int) -> None:
    tasks = BarrierPlan(Interval(1, "epoch"), evaluation=Interval(1, "epoch"))
    given: dict[str, Any] = {"batches": 6, "epochs": epochs, "tasks": tasks, "wait_for_metric": True}
    first, out = started(**given)
    if is_begun:
        meet(first, orders(out))
        assert CutEvaluation() in first.handle(Requested("stop"), 101.0)
        first.handle(TaskDone(0, ((0, 2, (("loss", 0.5),)),)), 102.0)
        commands = first.handle(TaskDone(1, ()), 103.0)
    else:
        first.handle(Requested("stop"), 1.0)
        commands = meet(first, orders(out), stop=True)
    save, _ = saved(first, commands)
    assert save.position.owed_epoch is not None
    assert (save.position.owed_epoch.epoch, save.position.owed_epoch.loss) == (0, None)
    assert save.position.metric is None
    for rank in (0, 1):
        over = first.handle(Exiting(rank), 300.0)
    assert end(over) == (True, 6, 1)

    second, out = started(**given, start=save.position)
    assert [c.order for c in out if isinstance(c, Send)] == [Evaluate(0, 0)] * 2
    second.handle(TaskDone(0, ((0, 2, (("loss", 0.5),)),)), 101.0)
    reported, *rest = second.handle(TaskDone(1, ()), 102.0)
    assert isinstance(reported, EpochMetrics)
    assert (reported.epoch, reported.eval) == (0, {"loss": 0.5})
    save, rest = saved(second, rest)
    assert (save.position.owed_epoch, save.position.metric) == (None, 0.5)
    if epochs == 2:
        assert orders(rest)[0].metrics == (0.5,)
        return
    assert rest == [Send(0, Leave()), Send(1, Leave())]
    second.handle(Exiting(0), 300.0)
    assert end(second.handle(Exiting(1), 300.0)) == (False, 6, 1)


def test_an_epoch_that_max_steps_has_cut_is_reported_anew_and_not_owed() -> None:
    given: dict[str, Any] = {
        "batches": 12,
        "max_steps": 6,
        "tasks": BarrierPlan(evaluation=Interval(1, "epoch")),
    }
    first, out = started(**given)
    meet(first, orders(out))
    first.handle(Requested("stop"), 101.0)
    first.handle(TaskDone(0, ()), 102.0)
    first.handle(TaskDone(1, ()), 103.0)
    first.handle(Exiting(0), 300.0)
    commands = first.handle(Exiting(1), 300.0)
    assert end(commands) == (True, 6, 0)
    [finish] = commands
    assert isinstance(finish, Finish)
    assert finish.position is not None
    assert finish.position.owed_epoch is None
    _, out = started(**given, start=finish.position)
    assert [c.order for c in out if isinstance(c, Send)] == [Evaluate(0, 0)] * 2


def test_a_run_goes_on_where_it_was_saved() -> None:
    first, out = started(batches=12, epochs=2)
    first.handle(Requested("checkpoint"), 1.0)
    assert first.rounds.cadence is not None
    first.rounds.cadence.guard.report((0.1, 0.2))
    save, _ = saved(first, meet(first, orders(out), steps=(2, 1), hurried=True, halt=True))
    second, out = started(batches=12, epochs=2, start=save.position)
    blocks = [c.order for c in out if isinstance(c, Send) and isinstance(c.order, StartEpoch)]
    dealt = {(order.epoch, batch) for order in blocks for batch in order.batches}
    assert min(dealt) == (0, 3)
    assert blocks[0].sync is not None
    assert (blocks[0].sync.global_step, blocks[0].sync.round) == (3, save.position.round)
    assert second.global_step == 3
    assert second.rounds.cadence is not None
    assert second.rounds.cadence.guard.history == (0.2,)


# ---------------------------------------------------------------- failures that a run survives
def alone(policy: Policy = "sync", **given: Any) -> tuple[Coordinator, dict[int, StartEpoch]]:
    machine, out = started(policy, batches=30, on_failure="continue", **given)
    return machine, orders(out)


def test_the_others_go_on_without_a_rank_that_failed_alone() -> None:
    machine, _ = alone()
    assert machine.handle(Exiting(1, "boom", is_alone=True), 1.0) == [LeaveGate(1)]
    outcome = Outcome(0, 1, (0,), (1, 0), (8, 0), left=(1,))
    commands = machine.handle(SyncAck(0, outcome, Work(0, 1, 8, pace_ms=1.0)), 2.0)
    assert orders(commands).keys() == {0}
    assert orders(commands)[0].batches[0] == 1  # batches dealt to the other one
    machine.handle(Requested("stop"), 3.0)
    first = orders(commands)[0].sync
    assert first is not None
    ended = Outcome(first.round, 2, (0,), (1, 0), (8, 0), stop=True)
    assert Send(0, Leave()) in machine.handle(SyncAck(0, ended, Work(0, 1, 8)), 4.0)
    commands = machine.handle(Exiting(0), 5.0)
    assert end(commands) == (True, 2, 0)
    assert isinstance(finish := commands[0], Finish)
    assert finish.position is not None
    assert finish.position.remaining(0) == (2, ())


@pytest.mark.parametrize(
    ("policy", "given", "fact"),
    [
        ("sync", {"on_failure": "raise"}, Exiting(1, "boom", is_alone=True)),
        ("sync", {}, Exiting(1, "boom")),
        ("async", {}, Exiting(1, "boom", is_alone=True)),
        ("exact", {"global_batch": GlobalBatch(4, 120)}, Exiting(1, "boom", is_alone=True)),
        ("sync", {"world_size": 1}, Exiting(0, "boom", is_alone=True)),
        ("sync", {}, Exiting(1)),
    ],
)
def test_a_failure_ends_the_run_where_the_others_cannot_go_on(
    policy: Policy, given: dict[str, Any], fact: Exiting
) -> None:
    machine = coordinator(policy, **{"batches": 30, "on_failure": "continue", **given})
    for rank in range(machine.config.world_size):
        machine.handle(WorkerReady(rank), 0.0)
    machine.handle(fact, 1.0)
    assert machine.phase in (Phase.FAILING, Phase.DONE)


def test_a_failure_in_a_duty_ends_the_run() -> None:
    machine, block = alone(tasks=BarrierPlan(Interval(2, "step")))
    meet(machine, block, halt=True)
    assert machine.barrier.is_asked
    machine.handle(Exiting(1, "boom", is_alone=True), 2.0)
    assert machine.phase is Phase.FAILING
    machine.handle(TaskDone(0), 3.0)  # sent before it knew of the end
    assert machine.phase is Phase.FAILING


# ---------------------------------------------------------------- NaN or inf parameters
def test_a_bad_replica_is_healed_by_a_sound_one() -> None:
    machine, out = started()
    commands = meet(machine, orders(out), bad=(0,))
    assert Quarantined(0, None) in commands
    assert Send(0, CopyReplica(donor=1)) in commands
    assert orders(commands) == {}
    assert set(orders(machine.handle(TaskDone(0), 200.0))) == {0, 1}


def test_without_a_sound_replica_the_run_fails() -> None:
    machine, out = started()
    commands = meet(machine, orders(out), bad=(0, 1))
    [failure] = [command for command in commands if isinstance(command, Fail)]
    assert failure.kind == "numbers"
    assert machine.phase is Phase.FAILING


def under_way(**given: Any) -> tuple[Coordinator, list[dict[int, StartEpoch]]]:
    """A run with two blocks under way."""
    machine, out = started(batches=400, **given)
    commands = meet(machine, orders(out))
    sent = [c for c in commands if isinstance(c, Send) and isinstance(c.order, StartEpoch)]
    blocks = [{c.rank: c.order for c in sent[at : at + 2]} for at in (0, 2)]
    return machine, blocks  # type: ignore[return-value]


def test_of_one_replica_acknowledgment_and_outcome_tell_as_of_one() -> None:
    machine, blocks = under_way()
    commands = meet(machine, blocks[0], late=(0,))
    assert Quarantined(0, (0, 7)) in commands
    assert Send(0, CopyReplica(1)) not in commands  # a round is under way
    commands = meet(machine, blocks[1], bad=(0,), halt=True)
    assert Quarantined(0, None) not in commands
    assert Send(0, CopyReplica(1)) in commands
    again = machine.handle(TaskDone(0), 200.0)
    assert Quarantined(0, (0, 7)) in meet(machine, orders(again), late=(0,))


def test_a_run_fails_whose_only_sound_replica_leaves() -> None:
    machine, blocks = under_way(on_failure="continue")
    meet(machine, blocks[0], late=(0,))
    commands = machine.handle(Exiting(1, "boom", is_alone=True), 200.0)
    [failure] = [command for command in commands if isinstance(command, Fail)]
    assert failure.kind == "numbers"


def test_a_scheduler_sees_one_kind_of_loss() -> None:
    machine = Coordinator(CoordinatorConfig(world_size=1, batches=1, wait_for_metric=True, max_steps=9))
    own, evaluated = ended_epoch(0, 2.0), ended_epoch(1, 3.0, loss=5.0)
    machine._watch_metric([own])
    assert machine.epochs.metrics == (2.0,)
    tasks = BarrierPlan(evaluation=Interval(2, "epoch"))
    machine = Coordinator(
        CoordinatorConfig(world_size=1, batches=1, wait_for_metric=True, max_steps=9, tasks=tasks)
    )
    # The metric of an epoch without an evaluation cannot be compared with the others.
    machine._watch_metric([own])
    assert machine.epochs.metrics == (None,)
    machine._watch_metric([evaluated])
    assert machine.epochs.metrics == (5.0,)


def ended_epoch(epoch: int, training_loss: float, **means: float) -> EpochMetrics:
    tally = Tally(epoch, 1)
    tally.add(0, Work(epoch, 1, 1, losses=(training_loss, 1)))
    return replace(tally.result(1.0, 1, 1, None), eval=means)


def calls_per_fact(policy: Policy, ranks: int) -> float:
    """Python and C calls of the coordinator's machine per fact, in a run of `ranks` unequal devices."""
    is_exact = policy == "exact"
    config = CoordinatorConfig(
        world_size=ranks,
        batches=24 if is_exact else 24 * ranks,
        epochs=1,
        policy=policy,
        cadence=CadenceOptions(max_anchor=4),
        global_batch=GlobalBatch(8 * ranks, 8 * 24 * ranks, may_be_alone=True) if is_exact else None,
    )
    devices = [VirtualRank(WorkerMachine(rank), 10.0 + 10.0 * rank / ranks) for rank in range(ranks)]
    world = World(
        Coordinator(config), GateState(ranks), devices, seed=0, sync_ms=0.5, noise=0.0, batch_size=8
    )
    world.run()
    machine, calls = Coordinator(config), 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for now_ms, fact in world.facts:
            machine.handle(fact, now_ms)
    finally:
        sys.setprofile(before)
    return calls / len(world.facts)


@pytest.mark.parametrize("policy", ["sync", "cadence", "exact"])
def test_the_work_per_fact_does_not_grow_with_the_ranks(policy: Policy) -> None:
    # Each rank acknowledges each order, so work per fact that grows with the ranks is quadratic per round.
    assert calls_per_fact(policy, 256) < 1.2 * calls_per_fact(policy, 16)


# ---------------------------------------------------------------- several machines
def test_a_lost_machine_is_not_waited_for() -> None:
    machine, _ = started(world_size=2, machines=(1, 1))
    commands = machine.handle(Failed("machine 1 is lost", (1,)), 5.0)
    assert commands == [AbortGate("machine 1 is lost"), Send(0, Leave("machine 1 is lost"))]
    [finish] = machine.handle(Exiting(0), 6.0)
    assert isinstance(finish, Finish)
    assert finish.error == "machine 1 is lost"
