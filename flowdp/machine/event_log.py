"""The event log of a run: every fact that the coordinator took, its time, and the commands that answer it.

The coordinator is pure, so the log determines a run: a fresh coordinator that takes the same facts at the
same times gives the same commands, or the first difference is the bug. A run keeps its last facts; with a
sink it writes all of them, as JSON lines: a header, then one line per fact.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from flowdp.machine import barrier_tasks
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator
from flowdp.options import CadenceOptions
from flowdp.policy.metric_array import MetricArray
from flowdp.policy.tally import RankMetrics
from flowdp.protocol import commands, messages, position
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact

__all__ = ["EventLog", "Replay", "brief", "decode", "encode", "replay"]

FORMAT = 1
"""Raised when old event logs can no longer be read."""

HALF = 2048
"""Facts are forgotten by so many at a time; between one and two times as many are kept."""

RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        *(*vars(messages).values(), *vars(commands).values(), *vars(position).values()),
        *(*vars(barrier_tasks).values(), RankMetrics, MetricArray),
        *(CoordinatorConfig, GlobalBatch, CadenceOptions),
    )
    if isinstance(record, type) and is_dataclass(record)
}
"""Everything that may stand in an event log, by its name."""


# ---------------------------------------------------------------- records as JSON
def encode(value: object) -> Any:
    """A message as JSON values: `{name: {field: value}}`, so that every object has one key, its type.

    A mapping is `{"dict": ...}`, a float that JSON does not know `{"float": "nan"}`, bytes are
    `{"bytes": "0100"}`.

    Raises:
        TypeError: The value is no message, nor can it be part of one.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": {name: encode(item) for name, item in value.items()}}
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"an event log cannot hold {value!r}")
    return {name: {part.name: encode(getattr(value, part.name)) for part in fields(RECORDS[name])}}


def decode(data: Any) -> Any:
    """The message that `encode` made this of; sequences become tuples.

    Raises:
        ValueError: It is not the work of `encode`.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"an object of an event log has one key, its type, not {sorted(data)}")
    [(name, value)] = data.items()
    if name == "float":
        return float(value)
    if name == "bytes":
        return bytes.fromhex(value)
    if name != "dict" and name not in RECORDS:
        raise ValueError(f"an event log knows no {name!r}")
    parts = {key: decode(item) for key, item in value.items()}
    try:
        return parts if name == "dict" else RECORDS[name](**parts)
    except TypeError as error:
        raise ValueError(f"{name} of another version: {error}") from error


def brief(value: object) -> str:
    """A message as short text: fields at their default are left out, long sequences cut."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        shown = [brief(item) for item in (value if len(value) <= 8 else value[:3])]
        more = f", .. {brief(value[-1])}: {len(value)} in all" if len(value) > 8 else ""
        return "(" + ", ".join(shown) + more + ")"
    if not is_dataclass(value) or isinstance(value, type):
        return str(value)
    said = [
        f"{part.name}={brief(given)}"
        for part in fields(value)
        if (given := getattr(value, part.name)) != part.default
        and (part.default_factory is MISSING or given != part.default_factory())
    ]
    return f"{type(value).__name__}({', '.join(said)})"


# ---------------------------------------------------------------- the log
@dataclass(frozen=True, slots=True)
class _Event:
    """A fact, and the commands that answered it."""

    now_ms: float
    fact: Fact
    commands: Sequence[Command]

    def line(self) -> str:
        said = {"now_ms": self.now_ms, "fact": encode(self.fact), "commands": encode(tuple(self.commands))}
        return json.dumps(said, allow_nan=False)

    def __str__(self) -> str:
        answer = "; ".join(map(brief, self.commands)) or "-"
        return f"{self.now_ms:.1f} ms {brief(self.fact)} => {answer}"


@dataclass(slots=True)
class _Half:
    """A stretch of the event log, and the machine as it was before."""

    before: Coordinator
    first: int  # number of its first event
    events: list[_Event] = field(default_factory=list)


class EventLog:
    """The ordered log of a run.

    ::

        event_log = EventLog(coordinator, sink=file.write)
        commands = coordinator.handle(fact, now_ms)
        event_log.take(fact, now_ms, commands)

    Threads: `take`: the one that runs the coordinator. The rest: any.

    Args:
        coordinator: The machine whose event log this is, before its first fact. It is copied now and then, so
            that the kept events can be replayed.
        sink: Called with each line as it comes, newline included, the header first; None: nothing is encoded.
    """

    def __init__(self, coordinator: Coordinator, sink: Callable[[str], object] | None = None) -> None:
        self._coordinator = coordinator
        self._sink = sink
        # One or two; replaced as a whole, so that another thread reads those of before or those of after.
        self._halves: tuple[_Half, ...] = (_Half(copy.deepcopy(coordinator), 0),)
        if sink is not None:
            sink(self._header(0) + "\n")

    def take(self, fact: Fact, now_ms: float, commands: Sequence[Command]) -> None:
        """Write down a fact that `handle` has just taken, and its commands."""
        event = _Event(now_ms, fact, commands)
        half = self._halves[-1]
        half.events.append(event)
        if len(half.events) == HALF:
            self._halves = (half, _Half(copy.deepcopy(self._coordinator), half.first + HALF))
        if self._sink is not None:
            self._sink(event.line() + "\n")

    def lines(self) -> list[str]:
        """JSON lines of the log; the header says how many earlier facts were dropped."""
        oldest, events = self._kept()
        return [self._header(oldest.first), *(event.line() for event in events)]

    def tail(self, count: int) -> list[str]:
        """The last events as short text, oldest first."""
        return [str(event) for event in self._kept()[1][-count:]]

    def replay(self) -> Replay:
        """Replay the events that are kept, from the machine as it was before them."""
        oldest, events = self._kept()
        told = (
            (f"fact {number}", event.now_ms, event.fact, encode(tuple(event.commands)))
            for number, event in enumerate(events, oldest.first)
        )
        return _replay(copy.deepcopy(oldest.before), told)

    def _kept(self) -> tuple[_Half, list[_Event]]:
        halves = self._halves
        return halves[0], [event for half in halves for event in list(half.events)]

    def _header(self, dropped: int) -> str:
        return json.dumps(
            {"event_log": FORMAT, "config": encode(self._coordinator.config), "dropped": dropped},
            allow_nan=False,
        )


# ---------------------------------------------------------------- replaying
@dataclass(frozen=True, slots=True)
class Replay:
    """Result of replaying an event log.

    Attributes:
        events: Facts that were taken and answered as the event log says.
        error: Where and how it went otherwise; None when the event log is the same to its end.
        coordinator: The machine as it stands then; None where the event log could not be begun.
    """

    events: int
    error: str | None
    coordinator: Coordinator | None


def replay(lines: Iterable[str]) -> Replay:
    """Let a fresh coordinator take the facts of an event log, and compare its commands.

    The first other command, error or broken invariant ends it, and is named with its line.
    """
    told = iter(lines)
    try:
        header = json.loads(next(told, ""))
        if header["event_log"] != FORMAT:
            return Replay(0, f"line 1: an event log of format {header['event_log']}, not {FORMAT}", None)
        if header["dropped"]:
            return Replay(0, f"line 1: the first {header['dropped']} facts are missing", None)
        coordinator = Coordinator(decode(header["config"]))
    except (ValueError, KeyError, TypeError) as error:
        return Replay(0, f"line 1: not the header of an event log: {error!r}", None)
    return _replay(coordinator, _parse(told))


_Told = tuple[str, float, Fact, Any]
"""Where it stands, time, fact, encoded commands."""


class _UnreadableError(Exception):
    """A line is not one of an event log."""


def _parse(lines: Iterable[str]) -> Iterator[_Told]:
    for number, line in enumerate(lines, 2):
        try:
            said = json.loads(line)
            yield f"line {number}", float(said["now_ms"]), decode(said["fact"]), said["commands"]
        except (ValueError, KeyError, TypeError) as error:
            raise _UnreadableError(f"line {number}: not a line of an event log: {error!r}") from error


def _replay(coordinator: Coordinator, told: Iterable[_Told]) -> Replay:
    events = 0
    try:
        for where, now_ms, fact, expected in told:
            try:
                given = encode(tuple(coordinator.handle(fact, now_ms)))
                coordinator.check()
            except Exception as error:  # any error of the run is the one looked for
                what = f"{type(error).__name__}: {error}"
                return Replay(events, f"{where}: {brief(fact)} raises {what}", coordinator)
            if given != expected:
                return Replay(events, f"{where}: {brief(fact)} {_difference(given, expected)}", coordinator)
            events += 1
    except _UnreadableError as error:
        return Replay(events, str(error), coordinator)
    return Replay(events, None, coordinator)


def _difference(given: list[Any], expected: list[Any]) -> str:
    for number, (now, then) in enumerate(zip(given, expected, strict=False)):
        if now != then:
            return f"gave command {number} {json.dumps(then)}, and gives {json.dumps(now)} now"
    return f"gave {len(expected)} commands, and gives {len(given)} now"
