"""Tests of the worker's machine: actions for given orders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.worker import (
    Apply,
    Done,
    Idle,
    Snapshot,
    Step,
    WorkerMachine,
)
from flowdp.protocol.gate import Window
from flowdp.protocol.messages import (
    Arrival,
    DataEnded,
    Evaluate,
    Leave,
    Outcome,
    Pace,
    RequestParams,
    SampleRange,
    SaveState,
    StartEpoch,
    SyncNow,
    SyncPoints,
    Throttle,
    Update,
)


def planned(
    batches: tuple[int, ...],
    *,
    round: int = 0,
    count: int = 1,
    before: int = 0,
    steps: int = 10,
    plan: int = 0,
) -> StartEpoch:
    sync = SyncPoints(round, len(batches) // count, count, before, steps)
    return StartEpoch(plan, 0, batches, sync)


def outcome(round: int = 0, global_step: int = 10, **voids: Any) -> Outcome:
    return Outcome(round, global_step, (0, 1), (0, 0), (0, 0), **voids)


def step(machine: WorkerMachine, sync_now: int | None = None, samples: int = 8) -> Step:
    if sync_now is not None:
        machine.handle(SyncNow(sync_now))
    action = machine.next()
    assert isinstance(action, Step)
    machine.trained(samples)
    return action


def upcoming(machine: WorkerMachine) -> list[tuple[int, int]]:
    return [(epoch, batch) for epoch, batch, _ in machine.upcoming()]


def enter(machine: WorkerMachine, sync_now: int | None = None) -> Arrival:
    if sync_now is not None:
        machine.handle(SyncNow(sync_now))
    action = machine.next()
    assert isinstance(action, Arrival)
    return action


def test_without_orders_it_waits() -> None:
    assert WorkerMachine(0).next() == Idle()


def test_an_order_is_trained_and_then_met() -> None:
    machine = WorkerMachine(1)
    machine.handle(StartEpoch(0, 3, (5, 7), SyncPoints(2, 2, 1, 100, 10, drift=True), metrics=(0.5,)))
    # Two steps, at schedule positions spread over the 10 steps of all ranks.
    assert step(machine) == Step(3, (5,), 100, (0.5,))
    assert step(machine) == Step(3, (7,), 105, (0.5,))
    # Then the gate, with all steps done.
    assert machine.next() == Arrival(1, 2, 100, 2, 16, drift=True)
    # The mean ends the order, and the count starts anew.
    assert machine.met(outcome(2, 110)) == Done(0, 3, 2)
    assert (machine.steps, machine.samples, machine.total_steps) == (0, 0, 2)
    assert machine.next() == Idle()


def test_the_next_order_lies_ready() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0,)))
    machine.handle(planned((1,), round=1, before=10))
    step(machine)
    enter(machine)
    assert machine.met(outcome()) == Done(0, 0, 1)
    assert step(machine).batches == (1,)


def test_a_block_holds_several_rounds() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0, 1, 2, 3), round=5, count=2, before=20, steps=4))
    # First round: two steps, met as round 5.
    assert [step(machine).position, step(machine).position] == [20, 22]
    assert enter(machine) == Arrival(0, 5, 20, 2, 16)
    assert machine.met(outcome(5, 24)) is None
    # Second round: the next two, from where the first ended.
    assert [step(machine).position, step(machine).position] == [24, 26]
    assert enter(machine) == Arrival(0, 6, 24, 2, 16)
    assert machine.met(outcome(6, 28)) == Done(0, 0, 4)


def test_a_rank_without_batches_meets_with_nothing() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((), round=3, before=30))
    assert enter(machine) == Arrival(0, 3, 30, 0, 0)
    assert machine.met(outcome(3, 40)) == Done(0, 0, 0)


def test_sync_now_sends_it_to_the_gate_with_what_there_is() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0, 1, 2, 3), round=7))
    step(machine, sync_now=6)
    # For this round: three batches are left.
    assert enter(machine, sync_now=7) == Arrival(0, 7, 0, 1, 8, left=3)
    assert machine.met(outcome(7, hurried=True)) == Done(0, 0, 1)


@pytest.mark.parametrize("wish", ["stop", "pause", "hurried"])
def test_an_outcome_that_voids_drops_what_is_armed(wish: str) -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0, 1), count=2))
    machine.handle(planned((2,), round=2))
    step(machine)
    enter(machine)
    # The block ends after its first round, and the order after it is void.
    assert machine.met(outcome(**{wish: True})) == Done(0, 0, 1)
    assert machine.next() == Idle()
    # So is an order of that plan still in the queue; one of the next plan is not.
    machine.handle(planned((2,), round=2))
    assert machine.next() == Idle()
    machine.handle(planned((1,), round=1, plan=1))
    assert step(machine).batches == (1,)


def test_it_leaves_when_told_even_between_two_steps() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0, 1)))
    step(machine)
    machine.handle(Leave())
    assert machine.next() == Leave()


@pytest.mark.parametrize("orders", [(Leave(), Leave("rank 1 failed")), (Leave("rank 1 failed"), Leave())])
def test_a_failure_is_the_reason_to_leave_whenever_it_comes(orders: tuple[Leave, Leave]) -> None:
    machine = WorkerMachine(0)
    for order in orders:
        machine.handle(order)
    assert machine.next() == Leave("rank 1 failed")


# ---------------------------------------------------------------- async
def free(batches: tuple[int, ...], plan: int = 0) -> StartEpoch:
    return StartEpoch(plan, 0, batches, pace=Pace(steps=6, quota=2))


def test_a_throttle_stops_a_rank_within_its_order_until_the_next_one() -> None:
    machine = WorkerMachine(0)
    machine.handle(Throttle(2, "at its lead limit"))
    machine.handle(free((0, 1, 2)))
    step(machine)
    assert machine.throttled is None
    step(machine)
    assert machine.throttled == "at its lead limit"
    # Its steps so far are reported, as the others wait for them; it keeps the rest of the order.
    assert machine.next() == Done(0, 0, 2, is_last=False)
    assert machine.next() == Idle()
    assert upcoming(machine) == [(0, 2)]
    machine.handle(Throttle(9, "at its lead limit"))
    assert machine.throttled is None
    assert step(machine).batches == (2,)
    assert machine.next() == Done(0, 0, 1)


def test_a_step_that_has_begun_is_finished_beyond_a_throttle_and_a_call() -> None:
    machine = WorkerMachine(0)
    machine.handle(free((0, 1)))
    machine.handle(Throttle(0, "at its lead limit"))
    machine.handle(SyncNow(3))
    assert isinstance(machine.next(in_step=True), Step)
    assert machine.next() == Idle()


def test_a_long_order_is_reported_in_parts() -> None:
    machine = WorkerMachine(0)
    machine.handle(replace(free((0, 1, 2, 3, 4)), report_every=2))
    said = []
    while (action := machine.next()) != Idle():
        if isinstance(action, Step):
            machine.trained(8)
        else:
            said.append(action)
    assert said == [Done(0, 0, 2, is_last=False)] * 2 + [Done(0, 0, 1)]


def test_an_order_without_a_meeting_is_reported() -> None:
    machine = WorkerMachine(0)
    machine.handle(free((0, 1)))
    machine.handle(free((2,)))
    # This rank takes a third of all steps, so each of its own counts for three.
    assert [step(machine).position, step(machine).position] == [0, 3]
    assert machine.next() == Done(0, 0, 2)
    assert step(machine).position == 6
    assert machine.next() == Done(0, 0, 1)
    assert machine.next() == Idle()
    # Its own, until a mean comes.
    assert (machine.steps, machine.samples) == (3, 24)
    machine.handle(RequestParams(4))
    machine.handle(Update(4, 9))
    machine.handle(free((3,)))
    assert machine.next() == Snapshot(4, 3, 24)
    assert machine.next() == Apply(4, 0)
    step(machine)
    assert machine.next() == Done(0, 0, 1, mean=4)


def test_a_snapshot_says_what_it_holds_and_its_mean_leaves_the_rest() -> None:
    machine = WorkerMachine(0)
    machine.handle(free((0, 1, 2, 3)))
    step(machine)
    step(machine)
    # A request is served between two steps.
    machine.handle(RequestParams(4))
    assert machine.next() == Snapshot(4, 2, 16)
    # One more step, not in the snapshot.
    step(machine)
    machine.handle(Update(4, global_step=50))
    assert machine.next() == Apply(4, 1)
    assert (machine.steps, machine.samples) == (1, 8)
    # The schedule continues from the mean: 50, and one own step since.
    assert step(machine).position == 53


def test_a_blocking_round_waits_for_the_orders_before_it() -> None:
    machine = WorkerMachine(0)
    machine.handle(free((0,)))
    machine.handle(StartEpoch(0, 0, (), SyncPoints(3, 0, 1, 20, 0)))
    step(machine)
    assert machine.next() == Done(0, 0, 1)
    assert enter(machine) == Arrival(0, 3, 20, 1, 8)
    assert machine.met(outcome(3, 21)) == Done(0, 0, 0)
    assert machine.steps == 0


def test_a_hurried_blocking_round_cuts_the_orders_before_it() -> None:
    machine = WorkerMachine(0)
    machine.handle(free((0, 1, 2)))
    machine.handle(free((3, 4)))
    machine.handle(StartEpoch(0, 0, (), SyncPoints(3, 0, 1, 20, 0)))
    step(machine)
    # For the meeting in the queue: four batches will be dealt again, as the gate reports.
    assert enter(machine, sync_now=3) == Arrival(0, 3, 20, 1, 8, left=4)
    # The acknowledgment is for the order that was cut, not for the empty one.
    assert machine.met(outcome(3, 21, hurried=True)) == Done(0, 0, 1)
    assert machine.next() == Idle()


def test_a_meeting_makes_an_earlier_snapshot_stale() -> None:
    machine = WorkerMachine(0)
    machine.handle(RequestParams(0))
    machine.next()
    machine.handle(StartEpoch(0, 0, (), SyncPoints(1, 0, 1, 0, 0)))
    enter(machine)
    machine.met(outcome(1, 0))
    machine.handle(Update(0, 0))
    with pytest.raises(ProtocolError, match="its snapshot is None"):
        machine.next()


# ---------------------------------------------------------------- steps of several batches
def test_a_step_takes_a_group_of_batches() -> None:
    machine = WorkerMachine(0)
    machine.handle(StartEpoch(0, 0, (4, 5, 8, 9, 12), SyncPoints(0, 3, 1, 0, 9), group=2))
    assert [step(machine, samples=n) for n in (16, 16, 8)] == [
        Step(0, (4, 5), 0),
        Step(0, (8, 9), 3),
        Step(0, (12,), 6),
    ]
    # Steps are counted, not batches.
    assert enter(machine) == Arrival(0, 0, 0, 3, 40)
    assert machine.met(outcome()) == Done(0, 0, 3)


# ---------------------------------------------------------------- a part of each window
def windows(*sizes: int, compare: bool = False) -> StartEpoch:
    parts = tuple(SampleRange(8, 8 + size) for size in sizes)
    sync = SyncPoints(5, 1, len(sizes), 20, 1, compare=compare)
    return StartEpoch(0, 1, tuple(range(3, 3 + len(sizes))), sync, parts=parts)


def test_a_window_is_one_step_and_one_meeting() -> None:
    machine = WorkerMachine(0)
    machine.handle(windows(4, 3))
    assert step(machine, samples=4) == Step(1, (3,), 20, part=SampleRange(8, 12))
    assert enter(machine) == Arrival(0, 5, 20, 1, 4, window=Window())
    assert machine.met(outcome(5, 21)) is None
    assert step(machine, samples=3) == Step(1, (4,), 21, part=SampleRange(8, 11))
    assert enter(machine) == Arrival(0, 6, 21, 1, 3, window=Window())
    assert machine.met(outcome(6, 22)) == Done(0, 1, 2)


def test_without_a_sample_there_is_the_meeting_alone() -> None:
    machine = WorkerMachine(0)
    machine.handle(windows(0, 3, 0))
    assert machine.upcoming() == [(1, 4, SampleRange(8, 11))]
    # It omits nothing, so nothing is void.
    assert enter(machine) == Arrival(0, 5, 20, 0, 0, window=Window())
    machine.met(outcome(5, 21))
    assert step(machine).batches == (4,)
    assert machine.upcoming() == []
    machine.met(outcome(6, 22))
    assert enter(machine) == Arrival(0, 7, 22, 0, 0, window=Window())
    assert machine.met(outcome(7, 23)) == Done(0, 1, 1)


def test_replicas_are_compared_after_the_last_round_of_a_block() -> None:
    machine = WorkerMachine(0)
    machine.handle(windows(4, 4, compare=True))
    step(machine)
    assert enter(machine).window == Window()
    machine.met(outcome(5, 21))
    step(machine)
    assert enter(machine).window == Window(compare=True)


# ---------------------------------------------------------------- upcoming batches
def test_upcoming_is_what_will_be_trained() -> None:
    machine = WorkerMachine(0)
    assert upcoming(machine) == []
    machine.handle(planned((3, 4), round=0))
    machine.handle(planned((7,), round=1))
    assert upcoming(machine) == [(0, 3), (0, 4), (0, 7)]
    step(machine)
    assert upcoming(machine) == [(0, 4), (0, 7)]
    step(machine)
    enter(machine)
    machine.met(outcome(0))
    assert upcoming(machine) == [(0, 7)]


def test_skipping_to_a_blocking_round_leaves_the_rest_to_others() -> None:
    machine = WorkerMachine(0)
    machine.handle(StartEpoch(0, 0, (1, 2), None))
    machine.handle(StartEpoch(1, 0, (3,), None))
    machine.handle(StartEpoch(2, 1, (0,), SyncPoints(0, 1, 1, 4, 2)))
    step(machine)
    enter(machine, sync_now=0)
    assert upcoming(machine) == [(1, 0)]


# ---------------------------------------------------------------- epochs of unknown length
def test_what_does_not_exist_is_left_at_the_gate_in_its_own_round_alone() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0, 2, 4, 6), count=2))
    machine.handle(planned((8, 10), round=2, before=20))
    plans = machine.plans
    step(machine)
    machine.handle(DataEnded(1, 0))  # of another epoch
    machine.handle(DataEnded(0, 6))
    assert machine.plans > plans
    assert upcoming(machine) == [(0, 2), (0, 4)]
    step(machine)
    # The first round has all of its batches, whenever the end became known.
    assert machine.next() == Arrival(0, 0, 0, 2, 16, left=0)
    assert machine.met(outcome()) is None
    step(machine)
    assert machine.next() == Arrival(0, 1, 10, 1, 8, left=1)
    assert machine.met(outcome(1, 20, hurried=True)) == Done(0, 0, 3)
    assert machine.next() == Idle()


# ---------------------------------------------------------------- barrier tasks, NaN parameters, resume
def test_a_duty_comes_after_what_is_out() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0,)))
    step(machine)
    machine.handle(SaveState(0))
    assert isinstance(machine.next(), Arrival)
    machine.met(outcome(halt=True))
    assert machine.next() == SaveState(0)
    machine.handle(Evaluate(0, 0))
    machine.handle(planned((1,), plan=1))
    assert machine.next() == Evaluate(0, 0)
    assert step(machine).batches == (1,)


def test_a_bad_replica_says_so_at_the_next_meeting() -> None:
    machine = WorkerMachine(0)
    machine.handle(planned((0,)))
    step(machine)
    machine.is_bad = True
    action = machine.next()
    assert isinstance(action, Arrival)
    assert action.bad
    machine.met(outcome(bad=(0,)))
    assert not machine.is_bad


def test_what_is_known_at_the_gate_alone_comes_into_the_arrival() -> None:
    machine = WorkerMachine(0)
    machine.handle(windows(4))
    step(machine, samples=4)
    arrival = enter(machine)
    assert machine.judged(arrival) is arrival
    machine.is_bad = True
    assert machine.judged(arrival) == replace(arrival, bad=True)
    assert machine.judged(arrival, b"ab") == replace(arrival, bad=True, window=Window(touched=b"ab"))


def test_the_schedule_goes_on_where_the_run_before_stood() -> None:
    machine = WorkerMachine(0, 40)
    machine.handle(StartEpoch(0, 0, (0, 1), pace=Pace(4, 2)))
    assert [step(machine).position for _ in range(2)] == [40, 42]


# ---------------------------------------------------------------- inner rounds of one machine
def with_inner(batches: tuple[int, ...], count: int) -> StartEpoch:
    order = planned(batches, count=count, before=7)
    assert order.sync is not None
    return replace(order, sync=replace(order.sync, inner=True, drift=True))


def entered(machine: WorkerMachine) -> Arrival:
    action = machine.next()
    assert isinstance(action, Arrival)
    return action


def trains(machine: WorkerMachine, steps: int) -> None:
    for _ in range(steps):
        assert isinstance(machine.next(), Step)
        machine.trained(8)


def test_only_the_last_round_of_an_order_is_one_of_all_machines() -> None:
    machine = WorkerMachine(0)
    machine.handle(with_inner((0, 1, 2, 3, 4, 5), 3))
    for round in range(3):
        trains(machine, 2)
        came = entered(machine)
        is_last = round == 2
        assert (came.round, came.global_step, came.steps, came.samples) == (round, 7, 2, 16)
        assert (came.inner, came.drift, came.left) == (not is_last, is_last, 0)
        done = machine.met(outcome(round, inner=not is_last))
    assert done == Done(0, 0, 6)


def test_a_hurried_rank_passes_the_inner_rounds_and_all_hear_of_it_at_the_last() -> None:
    machine = WorkerMachine(0)
    machine.handle(with_inner((0, 1, 2, 3, 4, 5), 3))
    trains(machine, 1)
    machine.handle(SyncNow(2))
    for round, steps, left in ((0, 1, 1), (1, 0, 2), (2, 0, 5)):
        came = entered(machine)
        assert (came.round, came.steps, came.left) == (round, steps, left)
        done = machine.met(outcome(round, inner=round < 2, hurried=True))
    assert done == Done(0, 0, 1)


def test_a_rank_that_an_inner_mean_left_out_says_so_at_the_round_of_all() -> None:
    machine = WorkerMachine(0)
    machine.handle(with_inner((0, 1, 2), 3))
    trains(machine, 1)
    machine.is_bad = True
    assert entered(machine).bad
    machine.met(replace(outcome(0, inner=True, bad=(0,)), samples=(0, 8)))
    trains(machine, 1)
    assert entered(machine).bad
    machine.met(replace(outcome(1, inner=True, bad=(0,)), samples=(0, 8)))
    trains(machine, 1)
    assert entered(machine).bad
    machine.met(outcome(2, bad=(0,)))
    assert not machine.is_bad
