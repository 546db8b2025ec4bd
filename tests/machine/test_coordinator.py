"""The coordinator: given facts and wishes, what it tells its shell."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.commands import (
    AbortGate,
    Command,
    Direct,
    EpochEnded,
    Fail,
    Finish,
    Hurry,
    Paused,
    RoundEnded,
    Send,
)
from flowdp.machine.coordinator import Coordinator, Life, RunConfig
from flowdp.machine.exact import ExactRounds
from flowdp.machine.planned import PlannedRounds
from flowdp.machine.snapshots import SnapshotRounds
from flowdp.messages import (
    Abort,
    DataEnded,
    Directives,
    Exiting,
    Outcome,
    Requested,
    Shutdown,
    SnapshotReady,
    StartEpoch,
    StepsDone,
    SyncAck,
    Throttle,
    Tick,
    Work,
    WorkerReady,
)
from flowdp.options import CadenceOptions, Policy


def coordinator(policy: Policy = "cadence", **given: Any) -> Coordinator:
    return Coordinator(RunConfig(**{"world_size": 2, "batches": 12, "epochs": 1, "policy": policy, **given}))


def started(policy: Policy = "cadence", **given: Any) -> tuple[Coordinator, list[Command]]:
    machine = coordinator(policy, **given)
    assert machine.handle(WorkerReady(1), 0.0) == []
    assert machine.life is Life.STARTING
    commands = machine.handle(WorkerReady(0), 0.0)
    assert machine.life is Life.RUNNING
    return machine, commands


def orders(commands: list[Command]) -> dict[int, StartEpoch]:
    """The first order of each rank among the commands."""
    found: dict[int, StartEpoch] = {}
    for command in commands:
        if isinstance(command, Send) and isinstance(command.order, StartEpoch):
            found.setdefault(command.rank, command.order)
    return found


def others(commands: list[Command]) -> list[Command]:
    """Commands that are neither orders to train nor records."""
    return [
        c
        for c in commands
        if not (
            isinstance(c, (RoundEnded, EpochEnded))
            or (isinstance(c, Send) and isinstance(c.order, StartEpoch))
        )
    ]


def meet(
    machine: Coordinator, block: dict[int, StartEpoch], steps: tuple[int, ...] | None = None, **wishes: Any
) -> list[Command]:
    """All ranks acknowledge that the block ended so."""
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
        commands += machine.handle(SyncAck(rank, outcome, work, 1.0), 100.0)
        machine.check()
    return commands


def test_nothing_begins_before_all_ranks_stand() -> None:
    _machine, commands = started()
    assert set(orders(commands)) == {0, 1}
    assert others(commands) == []


def test_a_run_ends_when_nothing_is_left() -> None:
    machine, commands = started(batches=6)
    # The only round is trained: the epoch is reported, and everybody may leave.
    commands = meet(machine, orders(commands))
    assert [type(c) for c in commands] == [RoundEnded, EpochEnded, Send, Send]
    assert others(commands) == [Send(0, Shutdown()), Send(1, Shutdown())]
    assert machine.life is Life.LEAVING
    # The run is over when the last one has.
    assert machine.handle(Exiting(0), 101.0) == []
    assert machine.handle(Exiting(1), 102.0) == [Finish(None, False, 6, 1)]
    assert machine.life is Life.DONE
    machine.check()


def test_a_stop_is_told_at_the_gate_and_ends_the_run() -> None:
    machine, commands = started()
    assert others(machine.handle(Requested("stop"), 5.0)) == [Direct(Directives(stop=True)), Hurry(0)]
    # Asked again, it is nothing new.
    assert machine.handle(Requested("stop"), 6.0) == []
    commands = meet(machine, orders(commands), (1, 0), stop=True, hurried=True)
    assert others(commands) == [Send(0, Shutdown()), Send(1, Shutdown())]
    machine.handle(Exiting(0), 1.0)
    assert machine.handle(Exiting(1), 1.0) == [Finish(None, True, 1, 0)]


def test_a_stop_before_the_first_order() -> None:
    machine = coordinator()
    assert machine.handle(Requested("stop"), 0.0) == []
    machine.handle(WorkerReady(0), 1.0)
    assert machine.handle(WorkerReady(1), 1.0) == [
        Direct(Directives(stop=True)),
        Send(0, Shutdown()),
        Send(1, Shutdown()),
    ]


def test_a_pause_stands_still_after_the_round_and_goes_on_from_there() -> None:
    machine, commands = started()
    assert others(machine.handle(Requested("pause"), 5.0)) == [Direct(Directives(pause=True)), Hurry(0)]
    commands = meet(machine, orders(commands), (2, 1), pause=True, hurried=True)
    # All stand still, and the first round after the pause shall not pause again.
    assert others(commands) == [Paused(True), Direct(Directives())]
    assert orders(commands) == {}
    assert machine.deadline_ms() is None
    # While it stands, nothing happens by itself.
    assert machine.handle(Tick(), 200.0) == []
    assert machine.handle(Requested("pause"), 201.0) == []
    # The batches that were left go out first.
    commands = machine.handle(Requested("unpause"), 300.0)
    assert others(commands) == [Paused(False)]
    assert sum(len(order.batches) for order in orders(commands).values()) > 0


def test_a_pause_taken_back_before_it_was_obeyed() -> None:
    machine, commands = started()
    machine.handle(Requested("pause"), 5.0)
    assert machine.handle(Requested("unpause"), 6.0) == [Direct(Directives())]
    # The hurry was said; the round ends early and the next ones follow.
    commands = meet(machine, orders(commands), (2, 1), hurried=True)
    assert others(commands) == []
    assert set(orders(commands)) == {0, 1}


def test_a_stop_while_paused() -> None:
    machine, commands = started()
    machine.handle(Requested("pause"), 5.0)
    meet(machine, orders(commands), (2, 1), pause=True, hurried=True)
    commands = machine.handle(Requested("stop"), 300.0)
    assert commands == [Direct(Directives(stop=True)), Send(0, Shutdown()), Send(1, Shutdown())]


def test_a_learning_rate_is_told_once() -> None:
    machine, _ = started("sync", batches=100)
    assert machine.handle(Requested("set_lr", 0.1), 5.0) == [Direct(Directives(lr=0.1))]
    # An outcome may have told it in the middle of a block, which no acknowledgment shows; the next wish must
    # not tell it again.
    assert machine.handle(Requested("pause"), 6.0) == [Direct(Directives(pause=True))]
    # The same rate, wished again, is another wish.
    assert machine.handle(Requested("set_lr", 0.1), 7.0) == [Direct(Directives(pause=True, lr=0.1))]


def test_a_learning_rate_calls_one_meeting_under_async() -> None:
    machine, commands = started("async", batches=100)
    commands = machine.handle(Requested("set_lr", 0.1), 5.0)
    assert others(commands) == [Direct(Directives(lr=0.1)), Hurry(0)]
    order = StartEpoch
    # The meeting is held; nobody wants another one.
    outcome = Outcome(0, 0, (0, 1), (0, 0), (0, 0), lr=0.1, hurried=True)
    machine.handle(SyncAck(0, outcome, Work(0, 0, 0)), 6.0)
    commands = machine.handle(SyncAck(1, outcome, Work(0, 0, 0)), 6.0)
    assert others(commands) == []
    assert all(isinstance(o, order) and o.sync is None for o in orders(commands).values())


def test_a_learning_rate_before_the_first_order() -> None:
    machine = coordinator("async")
    machine.handle(Requested("set_lr", 0.1), 0.0)
    machine.handle(WorkerReady(0), 1.0)
    commands = machine.handle(WorkerReady(1), 1.0)
    # There was nothing to meet for: first some batches, then the meeting.
    assert others(commands) == [Direct(Directives(lr=0.1))]
    assert all(order.sync is None for order in orders(commands).values())
    work = Work(0, 1, 8, 1.0, 0.0, 1.0)
    commands = machine.handle(StepsDone(0, 0, work), 2.0)
    assert others(commands) == [Hurry(0)]


def test_a_failure_frees_everybody() -> None:
    machine, _ = started()
    assert machine.handle(Exiting(1, "rank 1 failed"), 5.0) == [
        AbortGate("rank 1 failed"),
        Send(0, Abort("rank 1 failed")),
    ]
    assert machine.life is Life.FAILING
    # What was said before rank 0 heard of it is dropped, and so is a wish.
    assert machine.handle(SnapshotReady(0, 0, 1, 8), 5.5) == []
    assert machine.handle(Requested("stop"), 5.6) == []
    assert machine.deadline_ms() is None
    # The first failure is the one.
    assert machine.handle(Exiting(0, "rank 0 failed"), 6.0) == [Finish("rank 1 failed", True, 0, 0)]


def test_a_failure_at_the_start() -> None:
    machine = coordinator()
    machine.handle(WorkerReady(0), 0.0)
    commands = machine.handle(Exiting(1, "no memory"), 1.0)
    assert commands == [AbortGate("no memory"), Send(0, Abort("no memory"))]


def test_replicas_that_differ_end_the_run() -> None:
    machine, commands = started("exact", batches=1, window=8, samples=8)
    outcome = Outcome(0, 1, (0, 1), (1, 1), (4, 4), compare=True)
    work = Work(0, 1, 4, busy_ms=1.0, pace_ms=1.0)
    assert sorted(orders(commands)) == [0, 1]
    assert machine.handle(SyncAck(0, outcome, work, checksum=1), 1.0) == []
    commands = machine.handle(SyncAck(1, outcome, work, checksum=2), 1.0)
    [failure] = [command for command in commands if isinstance(command, Fail)]
    assert "rank 1 " in failure.error
    # The shell hears of it first; then everybody is freed as after any failure.
    reason = failure.error
    assert commands[-3:] == [AbortGate(reason), Send(0, Abort(reason)), Send(1, Abort(reason))]
    assert commands.index(failure) < commands.index(AbortGate(reason))
    for rank in (0, 1):
        commands = machine.handle(Exiting(rank), 2.0)
    assert commands == [Finish(reason, True, 1, 0)]


def test_windows_of_unknown_size_are_a_bug() -> None:
    with pytest.raises(ProtocolError, match="exact has to know its windows"):
        coordinator("exact")


def test_a_failure_while_leaving() -> None:
    machine, commands = started(batches=6)
    meet(machine, orders(commands))
    assert machine.handle(Exiting(0, "cannot copy the state"), 1.0) == [
        AbortGate("cannot copy the state"),
        Send(1, Abort("cannot copy the state")),
    ]
    assert machine.handle(Exiting(1), 1.0) == [Finish("cannot copy the state", False, 6, 1)]


def test_a_rank_that_leaves_untold_is_a_failure() -> None:
    machine, _ = started()
    commands = machine.handle(Exiting(0), 1.0)
    assert commands[0] == AbortGate("rank 0 left without being told to")


def test_a_late_snapshot_after_the_end_is_nothing() -> None:
    machine, _ = started("async", batches=100)
    machine.handle(Requested("stop"), 1.0)
    outcome = Outcome(0, 0, (0, 1), (0, 0), (0, 0), stop=True, hurried=True)
    machine.handle(SyncAck(0, outcome, Work(0, 0, 0)), 2.0)
    machine.handle(SyncAck(1, outcome, Work(0, 0, 0)), 2.0)
    assert machine.life is Life.LEAVING
    assert machine.handle(SnapshotReady(0, 0, 1, 8), 3.0) == []
    with pytest.raises(ProtocolError, match=r"unexpected SyncAck.* while the run is leaving"):
        machine.handle(SyncAck(0, outcome, Work(0, 0, 0)), 4.0)


def test_a_fact_about_rounds_before_the_run_began_is_a_bug() -> None:
    with pytest.raises(ProtocolError, match="while the run is starting"):
        coordinator().handle(SnapshotReady(0, 0, 1, 8), 0.0)


def test_the_deadline_is_that_of_the_rounds() -> None:
    machine, commands = started(batches=100)
    assert machine.deadline_ms() is None
    meet(machine, orders(commands))
    assert machine.deadline_ms() is not None
    assert machine.deadline_ms() == machine.rounds.deadline_ms()


def test_an_epoch_waits_for_the_loss_of_the_one_before() -> None:
    machine, _ = started("async", batches=2, epochs=2, wait_for_metric=True)
    # Both batches went to rank 0; it is done with the first, and the next epoch waits for the loss.
    commands = machine.handle(StepsDone(0, 0, Work(0, 1, 8, 1.0, 0.0, 1.0)), 2.0)
    assert commands == []
    assert machine.handle(Tick(), 2.0) == []
    commands = machine.handle(StepsDone(0, 0, Work(0, 1, 8, 1.0, 0.0, 1.0)), 3.0)
    assert [type(command) for command in commands[:1]] == [EpochEnded]
    # The loss is there: the second epoch is dealt.
    assert orders(commands)[0].epoch == 1


def test_a_rank_without_batches_is_told_so() -> None:
    _, commands = started("async", batches=2, epochs=2, wait_for_metric=True)
    assert others(commands) == [Send(1, Throttle("no data"))]


@pytest.mark.parametrize(
    ("given", "rounds", "has_cadence"),
    [
        ({"policy": "sync"}, PlannedRounds, False),
        ({"policy": "cadence"}, PlannedRounds, True),
        ({"policy": "async"}, SnapshotRounds, True),
        # Nothing to wait for, or nothing to gain: blocks of single steps.
        ({"policy": "async", "world_size": 1}, PlannedRounds, False),
        ({"policy": "cadence", "cadence": CadenceOptions(max_anchor=0)}, PlannedRounds, False),
        ({"policy": "cadence", "cadence": CadenceOptions(max_batch_diff=0)}, PlannedRounds, False),
        ({"policy": "async", "cadence": CadenceOptions(max_batch_diff=0)}, SnapshotRounds, True),
        ({"policy": "exact", "window": 8, "samples": 30}, ExactRounds, False),
        ({"policy": "exact", "window": 8, "samples": 30, "world_size": 1}, ExactRounds, False),
    ],
)
def test_which_rounds_run(given: dict[str, Any], rounds: type, has_cadence: bool) -> None:
    machine = Coordinator(RunConfig(**{"world_size": 2, "batches": 4, "epochs": 1, **given}))
    assert type(machine.rounds) is rounds
    assert (machine.rounds.cadence is not None) is has_cadence


def test_fixed_shares_reach_the_rounds() -> None:
    _machine, commands = started(batches=1000, ratios=(0.75, 0.25))
    block = orders(commands)
    assert len(block[0].batches) == 3 * len(block[1].batches)


def test_done_means_all_have_left() -> None:
    machine = coordinator()
    machine.life = Life.DONE
    with pytest.raises(ProtocolError, match=r"done while only \[\] have left"):
        machine.check()


# ---------------------------------------------------------------- epochs of unknown length
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_the_end_of_the_data_may_be_known_before_the_first_order(policy: Policy) -> None:
    machine = coordinator(policy, batches=None)
    assert machine.handle(DataEnded(0, 2), 0.0) == []
    machine.handle(WorkerReady(0), 0.0)
    out = machine.handle(WorkerReady(1), 0.0)
    dealt = [order.batches for c in out if isinstance(c, Send) and isinstance(order := c.order, StartEpoch)]
    assert sorted(batch for batches in dealt for batch in batches) == [0, 1]
    machine.check()


def test_the_end_of_the_data_is_passed_on_and_ends_the_run() -> None:
    machine, out = started(batches=None)
    block = orders(out)
    assert [order.batches for order in block.values()] == [(0, 2, 4), (1, 3, 5)]
    end = DataEnded(0, 5)
    assert machine.handle(end, 1.0) == [Send(1, end)]
    commands = meet(machine, block, steps=(3, 2), hurried=True)
    assert [type(c) for c in commands] == [RoundEnded, EpochEnded, Send, Send]
    assert others(commands) == [Send(0, Shutdown()), Send(1, Shutdown())]


@pytest.mark.parametrize("fact", [Exiting(1, "boom"), Requested("stop")])
def test_the_end_of_the_data_changes_nothing_in_a_run_that_is_leaving(fact: Any) -> None:
    machine, out = started(batches=None)
    machine.handle(fact, 1.0)
    if isinstance(fact, Requested):
        meet(machine, orders(out), steps=(1, 1), hurried=True, stop=True)
    assert machine.life in (Life.LEAVING, Life.FAILING)
    assert machine.handle(DataEnded(0, 2), 2.0) == []
    assert not machine.epochs.is_complete
