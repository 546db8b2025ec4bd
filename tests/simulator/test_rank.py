"""A rank on virtual time: its reports are what it did, and its replica is bad when it says so."""

from __future__ import annotations

import pytest

from flowdp.machine.worker import Done, Step, WorkerMachine
from flowdp.policy.tally import pace_ms
from flowdp.protocol.messages import Outcome, SampleRange, StartEpoch, SyncPoints, Throttle
from tests.simulator.rank import FaultyRank


def test_work_is_what_was_done_since_the_last_report() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    for ms in (10.0, 10.0, 40.0):
        rank.stepped(8, ms)
    work = rank.work(Done(0, 2, 3))
    assert (work.epoch, work.steps, work.samples, work.busy_ms, work.losses) == (2, 3, 24, 60.0, (24.0, 24))
    assert rank.work(Done(0, 2, 0)).busy_ms == 0.0
    assert rank.machine.total_steps == 3


def test_waiting_for_a_batch_belongs_to_the_pace_of_its_step() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    rank.stepped(8, 10.0)
    rank.asked_ms = 100.0
    rank.wake(115.0)
    assert rank.asked_ms is None
    rank.wake(150.0)
    rank.stepped(8, 10.0)
    work = rank.work(Done(0, 0, 2))
    assert (work.busy_ms, work.data_ms) == (20.0, 15.0)
    assert work.pace_ms == pace_ms(35.0, 25.0, 2)


def test_the_machine_takes_all_orders() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    rank.inbox.extend([Throttle(0, "a"), Throttle(0, "b")])
    rank.take_orders()
    assert rank.machine.throttled == "b"
    assert not rank.inbox


def test_what_stirs() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    assert rank.stirs == "is at starting"
    rank.state = "idle"
    assert rank.stirs == ""
    order = StartEpoch(0, 0, (0,), SyncPoints(0, 1, 1, 0, 1))
    rank.expect(order)
    assert rank.stirs == "has an order"
    rank.expect(Throttle(0, "no data"))
    rank.receive(order)
    rank.receive(Throttle(0, "no data"))
    assert rank.stirs == ""  # it is in the inbox, and the rank is idle for this moment alone
    rank.machine.handle(order)
    rank.machine.next()
    assert rank.stirs == "has an order"
    rank.state = "gone"
    assert rank.stirs == ""


def test_an_order_of_a_void_plan_stirs_nothing() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    rank.state = "idle"
    rank.machine.handle(StartEpoch(0, 0, (), SyncPoints(0, 0, 1, 0, 0)))
    rank.machine.next()
    rank.expect(StartEpoch(0, 0, (0,), SyncPoints(1, 1, 1, 0, 1)))
    rank.machine.met(Outcome(0, 0, (0,), (0,), (0,), halt=True))
    assert rank.stirs == ""
    rank.expect(StartEpoch(1, 0, (0,), SyncPoints(2, 1, 1, 0, 1)))
    assert rank.stirs == "has an order"


def test_the_first_bad_batch_is_reported_once() -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0)
    for batch in (3, 4):
        rank.goes_bad(Step(1, (batch,), 0))
        rank.stepped(8, 1.0)
    assert rank.machine.is_bad
    assert rank.work(Done(0, 1, 2)).bad == (1, 3)
    assert rank.work(Done(0, 1, 0)).bad is None


@pytest.mark.parametrize("heals", [True, False])
def test_a_late_verdict_is_heard_behind_the_mean(heals: bool) -> None:
    rank = FaultyRank(WorkerMachine(0), 1.0, heals=heals, is_late=True)
    for batch in (3, 4):
        rank.goes_bad(Step(1, (batch,), 0, part=SampleRange(0, 2)))
        rank.stepped(2, 1.0)
    rank.read()
    assert not rank.machine.is_bad
    rank.met()
    assert rank.unread == (1, 3)
    rank.read()
    assert rank.machine.is_bad == heals  # where nothing is healed, a report is enough
    assert rank.work(Done(0, 1, 2)).bad == (1, 3)
    rank.goes_bad(Step(1, (4,), 1, part=SampleRange(0, 2, by_all=False)))
    assert rank.machine.is_bad
