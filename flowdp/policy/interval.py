"""Checkpoints and evaluations that are due: by epochs, steps or minutes, and as far as their cost allows.

A checkpoint costs twice: all ranks stand still while they copy their state, and while the file is written
they may train more slowly, for the writer needs a core, the memory's bandwidth and the interpreter. The next
one waits until all of that time, as though nothing were trained in it, is 5 % of the time since.

Source:
    CheckFreq (Mohan et al., FAST 2021): the frequency of checkpoints follows from their measured overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["MINUTE_MS", "SHARE", "Interval", "SaveBudget", "SaveCost", "Schedule"]

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


MINUTE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval of checkpoints or evaluations.

    Attributes:
        every: After so many ...
        unit: ... of these; "step" is one of all ranks.
        max_minutes: Most minutes from one to the next, where `unit` is another one; None: no limit.
    """

    every: float
    unit: Literal["epoch", "step", "minute"]
    max_minutes: float | None = None

    @property
    def minutes(self) -> float | None:
        """Minutes from one to the next; None: none is due by the clock."""
        return self.every if self.unit == "minute" else self.max_minutes

    def ends_with(self, epoch: int) -> bool:
        """Whether one follows this epoch."""
        return self.unit == "epoch" and (epoch + 1) % self.every == 0


class Schedule:
    """Next checkpoint or evaluation that is due by steps or minutes; none is due twice at the same step.

    Args:
        plan: The interval; None, or one of epochs: none is due by itself.
        saved_step: Global step of the last one; -1 before the first.

    Attributes:
        is_wanted: One is due, or was asked for, and has not begun.
        is_put_off: Whether one was due at the last look, and was put off.
        is_between: The one that is wanted lies between two of the plan, because of its `max_minutes`.
        budget: Says until when.
    """

    def __init__(self, plan: Interval | None, saved_step: int = -1) -> None:
        self._plan = plan
        self._saved_step = saved_step
        self._next_step: int | None = None
        self._next_ms = math.inf
        self._is_late = False  # by the clock, and not saved since
        self._is_held = False  # the budget had nothing left at the last look
        self.is_wanted = self.is_put_off = self.is_between = False
        self.budget = SaveBudget()

    @property
    def limit(self) -> int | None:
        """Global step at which the next one is due; None: none is due at a step, or it will be put off."""
        return None if self._is_held else self._next_step

    @property
    def deadline_ms(self) -> float | None:
        """Time at which the next one is due; None: none is due by the clock."""
        due_ms = self.budget.free_ms if self.is_put_off else self._next_ms
        return None if math.isinf(due_ms) else due_ms

    def begin(self, now_ms: float, global_step: int) -> None:
        """Plan the next one, at the beginning or behind another one."""
        plan = self._plan
        if plan is not None and plan.unit == "step":
            every = int(plan.every)
            self._next_step = (global_step // every + 1) * every
        if plan is not None and plan.minutes is not None:
            self._next_ms = now_ms + plan.minutes * MINUTE_MS

    def ask(self) -> None:
        """Want one, whatever is due."""
        self.is_wanted, self.is_between = True, False

    def look(self, now_ms: float, global_step: int) -> None:
        """See whether one is due now."""
        if now_ms >= self._next_ms:
            self._is_late, self._next_ms = True, math.inf
        is_due = self._is_late or (self._next_step is not None and global_step >= self._next_step)
        is_due = is_due and global_step != self._saved_step
        self._is_held = now_ms < self.budget.free_ms
        self.is_put_off = is_due and self._is_held
        if is_due and not self._is_held and not self.is_wanted:
            self.is_wanted = True
            self.is_between = self._is_late and self._plan is not None and self._plan.unit != "minute"

    def is_last_due(self, global_step: int) -> bool:
        """Whether the end of the run is to be saved, too."""
        return self._plan is not None and self._saved_step != global_step

    def saved(self, now_ms: float, global_step: int) -> None:
        """The one of this step is being written, or evaluated."""
        self._saved_step, self._is_late = global_step, False
        self.is_put_off = self.is_wanted = self.is_between = False
        self.begin(now_ms, global_step)
