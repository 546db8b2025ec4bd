"""The event log of a run: the last facts that the coordinator took, their times, and its answers.

The coordinator is pure, so facts and times determine its commands: in a simulation a seed is enough to see a
failure again, and of a real run the last events show it. `encode` and `decode` are for positions in
checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from flowdp.policy import tally
from flowdp.protocol import position
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact, Tick

__all__ = ["EventLog", "brief", "decode", "encode"]

KEPT = 2048
"""Facts that a run keeps."""

RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (*vars(position).values(), *vars(tally).values())
    if isinstance(record, type) and is_dataclass(record)
}
"""Everything that may be a part of a position or a history, by its name."""


# ---------------------------------------------------------------- records as JSON
def encode(value: object) -> Any:
    """A record as JSON values: `{name: {field: value}}`, so that every object has one key, its type.

    A mapping is `{"dict": ...}`, a float that JSON does not know `{"float": "nan"}`.

    Raises:
        TypeError: The value is no record, nor can it be part of one.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": {name: encode(item) for name, item in value.items()}}
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"no record of a run can hold {value!r}")
    return {name: {part.name: encode(getattr(value, part.name)) for part in fields(RECORDS[name])}}


def decode(data: Any) -> Any:
    """The record that `encode` made this of; sequences become tuples.

    Raises:
        ValueError: It is not the work of `encode`.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"an encoded object has one key, its type, not {sorted(data)}")
    [(name, value)] = data.items()
    if name == "float":
        return float(value)
    if name != "dict" and name not in RECORDS:
        raise ValueError(f"no record is named {name!r}")
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
class EventLog:
    """The last events of a run, in order.

    Threads: `take`: the one that runs the coordinator. `tail`: any.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, Fact, Sequence[Command]]] = deque(maxlen=KEPT)

    def take(self, fact: Fact, now_ms: float, commands: Sequence[Command]) -> None:
        """Write down a fact that the coordinator has just taken, and its commands.

        A look at the clock that commands nothing is left out: in a standstill there is nothing else.
        """
        if commands or not isinstance(fact, Tick):
            self._events.append((now_ms, fact, commands))

    def tail(self, count: int) -> list[str]:
        """The last events as short text, oldest first."""
        return [
            f"{now_ms:.1f} ms {brief(fact)} => {'; '.join(map(brief, commands)) or '-'}"
            for now_ms, fact, commands in list(self._events.copy())[-count:]
        ]
