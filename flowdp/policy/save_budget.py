"""Budget of checkpoints: the time from which the next one keeps their cost at 5 % of the training.

A checkpoint costs twice: all ranks stand still while they copy their state, and while the file is written
they may train more slowly, for the writer needs a core, the memory's bandwidth and the interpreter. The next
one waits until all of that time, as though nothing were trained in it, is 5 % of the time since.

Source:
    CheckFreq (Mohan et al., FAST 2021): the frequency of checkpoints follows from their measured overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SHARE", "SaveBudget", "SaveCost"]

SHARE = 0.05
"""Largest part of the training time that scheduled checkpoints may cost."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of a checkpoint, at most.

    Attributes:
        stands_ms: Time in which all ranks stood still.
        write_ms: Time from then to the written file.
    """

    stands_ms: float
    write_ms: float

    @property
    def wait_ms(self) -> float:
        """Time from its checkpoint to the next one that fits."""
        return (self.stands_ms + self.write_ms) / SHARE


class SaveBudget:
    """Decides from when on the next checkpoint fits into the budget.

    Times are those of one clock, in milliseconds.

    Attributes:
        free_ms: Time from which the next checkpoint fits; infinite while one is being written.
        cost: Cost of the last checkpoint; None before the first, and until it is written.
    """

    def __init__(self) -> None:
        self.free_ms = -math.inf
        self.cost: SaveCost | None = None
        self._begin_ms = self._captured_ms = self._stands_ms = 0.0

    def saved(self, begin_ms: float, now_ms: float) -> None:
        """All ranks have copied their state, and a file is being written from now on.

        Args:
            begin_ms: Time since which they have stood still for it.
            now_ms: The time.
        """
        if self.free_ms != math.inf:  # else it was requested meanwhile, and both are one
            self._begin_ms, self._stands_ms = begin_ms, 0.0
        self._stands_ms += now_ms - begin_ms
        self._captured_ms = now_ms
        self.free_ms, self.cost = math.inf, None

    def written(self, now_ms: float) -> None:
        """The last file is written, or could not be."""
        if self.free_ms == math.inf:
            self.cost = SaveCost(self._stands_ms, now_ms - self._captured_ms)
            self.free_ms = self._begin_ms + self.cost.wait_ms
