"""The event log of a run: the last facts that the coordinator took, their times, and its answers.

The coordinator is pure, so facts and times determine its commands: in a simulation a seed is enough to see a
failure again, and of a real run the last events show it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass

from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact, Tick

__all__ = ["EventLog", "brief"]

KEPT = 2048
"""Facts that a run keeps."""


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
