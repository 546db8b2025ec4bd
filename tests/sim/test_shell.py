"""A worker's shell on virtual time: its reports are what it did."""

from __future__ import annotations

from flowdp.machine.worker import Done, Step, WorkerMachine
from flowdp.policy.tally import pace_ms
from flowdp.protocol.messages import Outcome, StartEpoch, SyncPoints, Throttle
from flowdp.sim.shell import Shell


def test_work_is_what_was_done_since_the_last_report() -> None:
    shell = Shell(WorkerMachine(0))
    for ms in (10.0, 10.0, 40.0):
        shell.stepped(8, ms)
    work = shell.work(Done(0, 2, 3))
    assert (work.epoch, work.steps, work.samples, work.busy_ms, work.losses) == (2, 3, 24, 60.0, (24.0, 24))
    assert shell.work(Done(0, 2, 0)).busy_ms == 0.0
    assert shell.machine.total_steps == 3


def test_waiting_for_a_batch_belongs_to_the_pace_of_its_step() -> None:
    shell = Shell(WorkerMachine(0))
    shell.stepped(8, 10.0)
    shell.asked_ms = 100.0
    shell.wake(115.0)
    assert shell.asked_ms is None
    shell.wake(150.0)
    shell.stepped(8, 10.0)
    work = shell.work(Done(0, 0, 2))
    assert (work.busy_ms, work.data_ms) == (20.0, 15.0)
    assert work.pace_ms == pace_ms(35.0, 25.0, 2)


def test_the_machine_takes_all_orders() -> None:
    shell = Shell(WorkerMachine(0))
    shell.inbox.extend([Throttle(0, "a"), Throttle(0, "b")])
    shell.wake(0.0)
    assert shell.machine.throttled == "b"
    assert not shell.inbox


def test_what_stirs() -> None:
    shell = Shell(WorkerMachine(0))
    assert shell.stirs == "is at starting"
    shell.state = "idle"
    assert shell.stirs == ""
    order = StartEpoch(0, 0, (0,), SyncPoints(0, 1, 1, 0, 1))
    shell.expect(order)
    assert shell.stirs == "has an order"
    shell.expect(Throttle(0, "no data"))
    shell.receive(order)
    shell.receive(Throttle(0, "no data"))
    assert shell.stirs == ""  # it is in the inbox, and the rank is idle for this moment alone
    shell.wake(0.0)
    shell.machine.next()
    assert shell.stirs == "has an order"
    shell.state = "gone"
    assert shell.stirs == ""


def test_an_order_of_a_void_plan_stirs_nothing() -> None:
    shell = Shell(WorkerMachine(0))
    shell.state = "idle"
    shell.machine.handle(StartEpoch(0, 0, (), SyncPoints(0, 0, 1, 0, 0)))
    shell.machine.next()
    shell.expect(StartEpoch(0, 0, (0,), SyncPoints(1, 1, 1, 0, 1)))
    shell.machine.met(Outcome(0, 0, (0,), (0,), (0,), halt=True))
    assert shell.stirs == ""
    shell.expect(StartEpoch(1, 0, (0,), SyncPoints(2, 1, 1, 0, 1)))
    assert shell.stirs == "has an order"


def test_the_first_bad_batch_is_reported_once() -> None:
    shell = Shell(WorkerMachine(0))
    for batch in (3, 4):
        shell.goes_bad(Step(1, (batch,), 0))
        shell.stepped(8, 1.0)
    assert shell.machine.is_bad
    assert shell.work(Done(0, 1, 2)).bad == (1, 3)
    assert shell.work(Done(0, 1, 0)).bad is None


def test_a_late_verdict_is_heard_behind_the_mean() -> None:
    shell = Shell(WorkerMachine(0, is_late=True))
    for batch in (3, 4):
        shell.goes_bad(Step(1, (batch,), 0))
        shell.stepped(8, 1.0)
    shell.read()
    assert (shell.machine.is_bad, shell.machine.was_bad) == (False, False)
    shell.met()
    assert shell.unread == (1, 3)
    shell.read()
    assert (shell.machine.is_bad, shell.machine.was_bad) == (False, True)
    assert shell.work(Done(0, 1, 2)).bad == (1, 3)
    assert not shell.machine.is_late
