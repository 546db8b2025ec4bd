"""Tests of the event log: messages round-trip, logs replay, and the first difference is reported."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import pytest

from flowdp.machine import event_log as module
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.event_log import RECORDS, EventLog, brief, decode, encode, replay
from flowdp.options import CadenceOptions
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol import commands, messages
from flowdp.protocol.commands import Command, Send
from flowdp.protocol.messages import (
    Exiting,
    Fact,
    Outcome,
    Requested,
    StartEpoch,
    SyncAck,
    SyncPoints,
    Tick,
    Work,
    WorkerReady,
)

MESSAGES = sorted(
    {
        value
        for value in (*(*vars(messages).values(), *vars(commands).values()), *vars(commands).values())
        if isinstance(value, type) and is_dataclass(value)
    },
    key=lambda record: record.__name__,
)


def example(kind: Any, name: str) -> Any:
    """A value of an annotated type other than its default."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return inner[-1]
    if origin is tuple:
        parts = inner[:-1] * 2 if inner[-1] is Ellipsis else inner
        return tuple(example(part, name) for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"float": example(inner[1], name), "dict": example(inner[1], name)}
    if origin is not None:  # a union
        return example(inner[0], name)
    if is_dataclass(kind):
        return filled(kind)
    return {bool: True, int: 7, float: math.inf, str: f"a {name}", bytes: b"\1\0"}[kind]


def filled(record: Any) -> Any:
    """A record with every field different from its default."""
    hints = typing.get_type_hints(record)
    values = {part.name: example(hints[part.name], part.name) for part in fields(record)}
    return record(**values | {part.name: False for part in fields(record) if part.default is True})


@pytest.mark.parametrize("record", MESSAGES, ids=lambda record: record.__name__)
def test_every_message_survives(record: type) -> None:
    message = filled(record)
    assert all(getattr(message, part.name) != part.default for part in fields(record))
    line = json.dumps(encode(message), allow_nan=False)
    assert decode(json.loads(line)) == message
    assert brief(message).startswith(f"{record.__name__}(")


def test_all_facts_and_commands_are_messages() -> None:
    for record in (*typing.get_args(Fact), *typing.get_args(Command), *typing.get_args(messages.Order)):
        assert RECORDS[record.__name__] is record
    assert len(MESSAGES) > 30


def test_a_config_survives() -> None:
    cadence = CadenceOptions(anchor=3, speed_hint=(1, 2.5), max_anchor=None)
    config = CoordinatorConfig(world_size=2, batches=5, max_steps=9, cadence=cadence, ratios=(0.25, 0.75))
    assert decode(encode(config)) == config
    # A list of ratios comes back as the tuple that the machine makes of it.
    assert decode(encode(replace(config, ratios=[0.25, 0.75]))) == config


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_json_does_not_know(value: float) -> None:
    work = Work(0, 1, 8, losses=(value, 8), scalars={"accuracy": (value, 1.0)}, lr=0.1)
    line = json.dumps(encode(work), allow_nan=False)
    back = decode(json.loads(line))
    assert repr(back) == repr(work)


def test_floats_come_back_to_the_last_bit() -> None:
    work = Work(0, 1, 8, busy_ms=0.1 + 0.2, pace_ms=1e-300)
    assert decode(json.loads(json.dumps(encode(work)))) == work


def test_a_foreign_value_is_refused() -> None:
    with pytest.raises(TypeError, match="an event log cannot hold"):
        encode(Exiting(0, object()))  # type: ignore[arg-type]

    class Tick:
        pass

    with pytest.raises(TypeError, match="an event log cannot hold"):
        encode(Tick())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"Gone": {}}, "an event log knows no 'Gone'"),
        ({"Tick": {}, "Abort": {}}, "has one key"),
        ({"Abort": {"why": "x"}}, "Abort of another version"),
        ({"float": "much"}, "could not convert"),
    ],
)
def test_what_encode_did_not_make(data: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(data)


def test_brief_says_what_is_not_as_usual() -> None:
    order = StartEpoch(3, 0, tuple(range(20)), SyncPoints(1, 20, 1, 0, 60))
    assert brief(order) == (
        "StartEpoch(plan=3, epoch=0, batches=(0, 1, 2, .. 19: 20 in all), "
        "sync=SyncPoints(round=1, every=20, count=1, global_step=0, steps=60))"
    )
    assert brief(Work(0, 1, 8, busy_ms=1 / 3)) == "Work(epoch=0, steps=1, samples=8, busy_ms=0.333333)"
    assert brief(Tick()) == "Tick()"


# ---------------------------------------------------------------- a run by hand
CONFIG = CoordinatorConfig(world_size=1, batches=100, epochs=100)


class Run:
    """One training device, its coordinator and its event log."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(CONFIG)
        self.written: list[str] = []
        self.event_log = EventLog(self.coordinator, self.written.append)
        self.now_ms = 0.0
        self.orders: list[StartEpoch] = []

    def handle(self, fact: Fact) -> None:
        self.now_ms += 1.0
        commands = self.coordinator.handle(fact, self.now_ms)
        self.event_log.take(fact, self.now_ms, commands)
        self.orders += [c.order for c in commands if isinstance(c, Send) and isinstance(c.order, StartEpoch)]

    def trains(self, rounds: int) -> None:
        for _ in range(rounds):
            order = self.orders.pop(0)
            assert order.sync is not None
            steps = len(order.batches)
            outcome = Outcome(order.sync.round, order.sync.global_step + steps, (0,), (steps,), (8 * steps,))
            work = Work(order.epoch, steps, 8 * steps, 50.0 * steps, 0.0, 50.0, (math.nan, 8 * steps))
            self.handle(SyncAck(0, outcome, work))


def run(rounds: int) -> Run:
    made = Run()
    made.handle(WorkerReady(0))
    made.trains(rounds)
    return made


def test_what_is_kept_is_what_was_written() -> None:
    made = run(20)
    assert [line + "\n" for line in made.event_log.lines()] == made.written
    assert len(made.written) == 1 + 21


def test_an_event_log_replays_to_the_same_machine() -> None:
    made = run(20)
    result = replay(made.written)
    assert (result.events, result.error) == (21, None)
    assert result.coordinator is not None
    assert result.coordinator.phase is Phase.RUNNING
    assert result.coordinator.global_step == made.coordinator.global_step > 0
    # The log in memory replays, too, and repeatedly.
    for _ in range(2):
        assert made.event_log.replay().error is None
        assert made.event_log.replay().events == 21


def test_nothing_is_encoded_without_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: object) -> object:
        raise AssertionError(f"{value} was encoded")

    monkeypatch.setattr(module, "encode", refuse)
    coordinator = Coordinator(CONFIG)
    event_log = EventLog(coordinator)
    event_log.take(WorkerReady(0), 1.0, coordinator.handle(WorkerReady(0), 1.0))
    assert len(event_log.tail(5)) == 1


def test_the_beginning_is_dropped_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HALF", 8)
    made = run(20)
    # 21 facts: two halves of eight; the oldest was dropped when the third began.
    lines = made.event_log.lines()
    assert json.loads(lines[0])["dropped"] == 8
    assert len(lines) == 1 + 13
    assert [line + "\n" for line in lines[1:]] == made.written[-13:]
    # A new machine cannot replay that; the saved one can.
    assert replay(lines).error == "line 1: the first 8 facts are missing"
    assert replay(lines).coordinator is None
    kept = made.event_log.replay()
    assert (kept.events, kept.error) == (13, None)
    assert kept.coordinator is not None
    assert kept.coordinator.global_step == made.coordinator.global_step
    # The file has everything.
    assert replay(made.written).events == 21


def test_the_limit_of_what_is_kept() -> None:
    coordinator = Coordinator(CONFIG)
    event_log = EventLog(coordinator)
    for number in range(5000):
        event_log.take(Tick(), float(number), [])
    assert json.loads(event_log.lines()[0])["dropped"] == 2048
    assert len(event_log.lines()) - 1 == 5000 - 2048
    assert len(event_log.lines()) - 1 <= 4096


def test_the_tail_is_text() -> None:
    made = run(2)
    first, *_, last = made.event_log.tail(3)
    assert first.startswith("1.0 ms WorkerReady(rank=0) => Send(rank=0, order=StartEpoch(")
    assert last.startswith("3.0 ms SyncAck(rank=0, outcome=Outcome(round=1, ")
    assert " => RoundEnded(round=1, " in last
    assert len(made.event_log.tail(2)) == 2
    made.handle(Tick())
    assert made.event_log.tail(1) == ["4.0 ms Tick() => -"]


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        # A changed command, a missing one, one too many.
        (1, lambda said: said["commands"][0]["Send"].update(rank=5), "gave command 0 .*rank.: 5.*gives"),
        (1, lambda said: said["commands"].pop(), "gave 0 commands, and gives 1 now"),
        (3, lambda said: said["commands"].append({"Tick": {}}), r"gave \d commands, and gives \d now"),
        # A fact that is impossible at that point.
        (
            3,
            lambda said: said["fact"]["SyncAck"].update(rank=9),
            r"rank=9, .* raises ProtocolError: unexpected",
        ),
        # Not a line of a log.
        (2, lambda said: said.pop("fact"), "not a line of an event log: KeyError"),
        (2, lambda said: said.update(fact={"Gone": {}}), "an event log knows no 'Gone'"),
    ],
)
def test_the_first_difference_is_named(number: int, change: Any, reason: str) -> None:
    lines = list(run(5).written)
    said = json.loads(lines[number])
    change(said)
    lines[number] = json.dumps(said)
    result = replay(lines)
    assert result.events == number - 1
    assert result.error is not None
    assert result.error.startswith(f"line {number + 1}: ")
    assert re.search(reason, result.error)


def test_a_broken_invariant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(5).written
    monkeypatch.setattr("flowdp.machine.planned_rounds.AHEAD", 0)
    result = replay(lines)
    assert (result.events, result.error) == (
        0,
        "line 2: WorkerReady(rank=0) raises ProtocolError: 1 orders are out, 0 may be",
    )


def test_an_event_log_torn_in_the_middle_of_a_line() -> None:
    lines = list(run(5).written)
    lines[-1] = lines[-1][:30]
    result = replay(lines)
    assert result.events == 5
    assert (result.error or "").startswith("line 7: not a line of an event log: JSONDecodeError")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", "not the header of an event log"),
        ("[1]", "not the header of an event log"),
        ('{"now_ms": 1.0}', "not the header of an event log"),
        ('{"event_log": 99}', "an event log of format 99, not 1"),
        (
            '{"event_log": 1, "dropped": 0, "config": {"CoordinatorConfig": {"size": 2}}}',
            "CoordinatorConfig of another version",
        ),
    ],
)
def test_what_is_no_event_log(header: str, reason: str) -> None:
    result = replay([header])
    assert (result.events, result.coordinator) == (0, None)
    assert reason in (result.error or "")


def test_a_run_that_failed_replays_to_its_failure() -> None:
    made = run(3)
    made.handle(Requested("set_lr", 0.5))
    made.handle(Exiting(0, "rank 0 failed"))
    result = replay(made.written)
    assert result.error is None
    assert result.coordinator is not None
    assert result.coordinator.phase is Phase.DONE
    assert result.coordinator.error == "rank 0 failed"


def test_epoch_records_are_in_the_event_log() -> None:
    assert RECORDS["EpochMetrics"] is EpochMetrics
    made = run(200)
    assert any("EpochEnded" in line for line in made.written)
    assert replay(made.written).error is None
