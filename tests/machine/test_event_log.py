"""Tests of the event log: messages are told in short, the last events are kept."""

from __future__ import annotations

from flowdp.machine.event_log import KEPT, EventLog, brief
from flowdp.protocol.commands import Send
from flowdp.protocol.messages import StartEpoch, SyncPoints, Tick, Work, WorkerReady


def test_brief_says_what_is_not_as_usual() -> None:
    order = StartEpoch(3, 0, tuple(range(20)), SyncPoints(1, 20, 1, 0, 60))
    assert brief(order) == (
        "StartEpoch(plan=3, epoch=0, batches=(0, 1, 2, .. 19: 20 in all), "
        "sync=SyncPoints(round=1, every=20, count=1, global_step=0, steps=60))"
    )
    assert brief(Work(0, 1, 8, busy_ms=1 / 3)) == "Work(epoch=0, steps=1, samples=8, busy_ms=0.333333)"
    assert brief(Tick()) == "Tick()"


def test_the_last_events_are_kept_and_told_as_text() -> None:
    event_log = EventLog()
    event_log.take(WorkerReady(0), 1.0, [Send(0, StartEpoch(0, 0, (1,)))])
    event_log.take(WorkerReady(1), 2.0, [])
    sent = "Send(rank=0, order=StartEpoch(plan=0, epoch=0, batches=(1)))"
    assert event_log.tail(3) == [f"1.0 ms WorkerReady(rank=0) => {sent}", "2.0 ms WorkerReady(rank=1) => -"]
    assert len(event_log.tail(1)) == 1
    for number in range(KEPT):
        event_log.take(WorkerReady(0), float(number), [])
    assert len(event_log.tail(2 * KEPT)) == KEPT
    assert event_log.tail(2 * KEPT)[0] == "0.0 ms WorkerReady(rank=0) => -"


def test_a_look_at_the_clock_is_an_event_where_it_commands_something() -> None:
    event_log = EventLog()
    event_log.take(Tick(), 1.0, [])
    event_log.take(Tick(), 2.0, [Send(0, StartEpoch(0, 0, (1,)))])
    [told] = event_log.tail(3)
    assert told.startswith("2.0 ms Tick() => Send(")
