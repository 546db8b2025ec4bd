"""When a machine has more to do than cores: a thread that spins may keep off the one that it waits for."""

from __future__ import annotations

__all__ = ["LOOK_S", "Crowd"]

LOOK_S = 0.25
"""Time between two looks."""

CROWDED = 2
"""Looks in a row that must see too many: some are there for a moment in every program ..."""

CALM = 8
"""... and looks in a row without."""


class Crowd:
    """Follows how many threads of all programs want to run.

    Args:
        cores: Of the machine.
        running: Threads that want to run, before ours compute: the first look counts at once.

    Attributes:
        is_there: Whether there are more than cores.
    """

    def __init__(self, cores: int, running: int) -> None:
        self._cores = cores
        self.is_there = running > cores
        self._others = 0  # looks in a row that say otherwise

    def look(self, running: int) -> bool:
        """Take what was seen; returns `is_there`."""
        self._others = self._others + 1 if (running > self._cores) is not self.is_there else 0
        if self._others == (CALM if self.is_there else CROWDED):
            self.is_there, self._others = not self.is_there, 0
        return self.is_there
