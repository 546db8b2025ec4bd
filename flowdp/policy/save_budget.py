"""Budget of checkpoints: the time from which the next one keeps their cost at 5 % of the training.

A checkpoint costs twice. All ranks stand still while they copy their state, and while the file is written
they train more slowly: the writer needs a core, the memory's bandwidth and the interpreter. The first is
measured at the barrier, the second by comparing the rounds during a writing with those before and behind it.
The next checkpoint fits when the time since the last one is `1 / AIM` times its cost.

Source:
    CheckFreq (Mohan et al., FAST 2021): the frequency of checkpoints follows from their measured overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowdp.policy.recovery import FAR

__all__ = ["AIM", "SHARE", "SaveBudget", "SaveCost"]

SHARE = 0.05
"""Largest part of the training time that scheduled checkpoints may cost."""

AIM = SHARE / 2
"""Part of the training time that the next checkpoint is planned for. Half of the largest: a loss of 50 ms is
measured as the difference of two times of 400 ms, and may seem half as large; and the first checkpoint, which
waits for nothing, is paid for before the second."""

EVIDENCE = 0.5
"""Undisturbed training to compare the rounds during a writing with: at least this part of their time."""

LUCK = 2.0
"""The next checkpoint is planned for at least the cost of the one before the last, divided by this."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of a checkpoint.

    Attributes:
        stands_ms: Time in which all ranks stood still.
        slowed_ms: Training time lost while the file was written.
        write_ms: Time from the capture to the written file.
    """

    stands_ms: float
    slowed_ms: float
    write_ms: float

    @property
    def lost_ms(self) -> float:
        """Training time lost in all."""
        return self.stands_ms + self.slowed_ms


@dataclass(slots=True)
class _Span:
    """Training time, and the steps of all ranks in it."""

    ms: float = 0.0
    steps: float = 0.0

    def add(self, other: _Span) -> None:
        self.ms += other.ms
        self.steps += other.steps


class SaveBudget:
    """Decides from when on the next checkpoint fits into the budget.

    Times are those of one clock, in milliseconds. A round that overlaps with a writing counts as slowed, as a
    whole: the part outside it adds nothing to the loss.
    """

    def __init__(self) -> None:
        self._undisturbed = _Span()
        self._is_warm = False  # the first record is over: caches that it filled make its steps slow
        self._slowed = _Span()  # since the last capture
        self._latest = _Span()  # the last record: a capture behind it may have shortened it
        self._is_latest_slowed = False
        self._is_complete = True  # all rounds that overlap with the writing are known
        self._begin_ms = -math.inf  # of the capture
        self._captured_ms = 0.0
        self._written_ms: float | None = 0.0  # None: is being written
        self._stands_ms = 0.0
        self._usual_ms = 0.0  # cost of the checkpoint before; 0: there was none

    @property
    def cost(self) -> SaveCost | None:
        """Cost of the last checkpoint as far as it is known; None before the first, and until it is written.

        While too little undisturbed training is known, all time of the writing counts as lost.
        """
        if self._written_ms is None or self._begin_ms == -math.inf:
            return None
        write_ms = self._written_ms - self._captured_ms
        slowed, base = self._slowed, self._undisturbed
        lost_ms = write_ms
        if self._is_complete and base.steps > 0 and base.ms >= EVIDENCE * slowed.ms:
            lost_ms = min(write_ms, max(0.0, slowed.ms - slowed.steps * base.ms / base.steps))
        return SaveCost(self._stands_ms, lost_ms, write_ms)

    @property
    def free_ms(self) -> float:
        """Time from which the next checkpoint fits; infinite while one is being written."""
        if self._begin_ms == -math.inf:
            return -math.inf
        return math.inf if self.cost is None else self._begin_ms + self.wait_ms

    @property
    def wait_ms(self) -> float:
        """Time from the last checkpoint to the next one that fits; 0 before the cost is known."""
        cost = self.cost
        if cost is None:
            return 0.0
        cost_ms = cost.lost_ms
        # One hiccup of the machine during a writing must not put checkpoints off for long: a cost far above
        # the one before counts when the next one confirms it.
        if self._usual_ms > 0:
            cost_ms = min(cost_ms, FAR * self._usual_ms)
        # And one that seems to have cost nothing must not bring a burst of them.
        return max(cost_ms, self._usual_ms / LUCK) / AIM

    @property
    def step_ms(self) -> float:
        """Undisturbed time of a step of all ranks together; 0 where not measured."""
        base = self._undisturbed
        return base.ms / base.steps if base.steps else 0.0

    def trained(self, now_ms: float, ms: float, steps: int) -> None:
        """Count rounds that have just ended.

        Args:
            now_ms: Their end.
            ms: Their duration.
            steps: Steps of all ranks in them.
        """
        if not ms > 0:
            return
        is_warm, self._is_warm = self._is_warm, True
        if not is_warm and self._written_ms is not None:
            return
        self._count_latest()
        written_ms = self._written_ms
        self._latest = _Span(ms, steps)
        self._is_latest_slowed = written_ms is None or now_ms - ms < written_ms
        self._is_complete = not self._is_latest_slowed

    def saved(self, begin_ms: float, now_ms: float) -> None:
        """All ranks have copied their state, and a file is being written from now on.

        Args:
            begin_ms: Time since which they have stood still for it.
            now_ms: The time.
        """
        if self._written_ms is not None:  # else it was requested meanwhile, and both are one
            if (cost := self.cost) is not None:
                self._usual_ms = max(cost.lost_ms, self._usual_ms / LUCK)
            if self._is_latest_slowed:
                self._count_latest()
            # Speeds change in the course of a run: those of long ago count less and less.
            base = self._undisturbed
            base.ms, base.steps = base.ms / 2, base.steps / 2
            # The round before may have been cut short, which costs a mean; where it is all that is known of
            # undisturbed training it is needed for that.
            self._is_latest_slowed = base.ms >= EVIDENCE * self._latest.ms
            self._begin_ms, self._stands_ms, self._slowed = begin_ms, 0.0, _Span()
        self._stands_ms += now_ms - begin_ms
        self._captured_ms, self._written_ms = now_ms, None
        self._is_complete = False

    def written(self, now_ms: float) -> None:
        """The last file is written, or could not be."""
        self._written_ms = now_ms

    def _count_latest(self) -> None:
        (self._slowed if self._is_latest_slowed else self._undisturbed).add(self._latest)
        self._latest, self._is_latest_slowed = _Span(), False
