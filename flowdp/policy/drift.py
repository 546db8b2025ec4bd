"""Distance between ranks: the drift of their replicas with its guard, and the lead in steps.

The drift of a rank is ||replica - mean|| / ||mean||, taken just before the mean replaces the replica. The
guard looks at the largest over the ranks, before the quotas of the next round are made.

The lead of a rank is the number of steps it has taken since the last mean, beyond the slowest rank that can
still move. A rank without data, or one that has left, holds no other back: waiting for it would never end.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

__all__ = ["DivergenceGuard", "GuardAction", "GuardDecision", "Overshoot", "largest_drift", "lead_limits"]

_HISTORY = 8
_RISES = 3
_SHORT = 0.5
"""Rounds of less than this part of the steps of the one at hand say nothing about its drift."""


class GuardAction(enum.Enum):
    """Request of the guard to the cadence."""

    STABLE = "stable"
    """Nothing."""
    HOLD = "hold"
    """Do not let the anchor grow."""
    TIGHTEN = "tighten"
    """Halve the anchor: average sooner."""


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """Request of the guard, with its reason.

    Attributes:
        action: The request.
        reason: A sentence with the figures; "" where it wants nothing.
    """

    action: GuardAction
    reason: str = ""


def largest_drift(drifts: Sequence[float]) -> float:
    """Largest drift; 0 without any, NaN where one is NaN."""
    # max() would drop a NaN or return it, depending on its place.
    if any(math.isnan(drift) for drift in drifts):
        return math.nan
    return max(drifts, default=0.0)


class DivergenceGuard:
    """Watches the largest drift, and holds or halves the anchor of the cadence.

    Three rising values with the last over the threshold hold the anchor, over twice the threshold they halve
    it. A drift that is NaN or infinite halves it at once, and the comparison begins anew behind it.

    Drifts are noisy: one of six draws of three values rises. So a rise has to leave the drifts before it
    behind, by more than their spread. And a longer round may drift further in proportion to its steps, which
    is no rise either.

    Args:
        threshold: Relative distance from the mean.
        history: Largest drifts of an earlier run; see `history`.
    """

    def __init__(self, threshold: float = 0.05, history: Sequence[float] = ()) -> None:
        self._threshold = threshold
        # With the steps of their rounds: those of an earlier run were as long as any that follows.
        self._history = deque(((drift, math.inf) for drift in history), maxlen=_HISTORY)

    @property
    def history(self) -> tuple[float, ...]:
        """The last largest drifts, at most eight, oldest first."""
        return tuple(drift for drift, _ in self._history)

    def report(self, drifts: Sequence[float], steps: float = 1.0) -> GuardDecision:
        """Take in the drift of each rank in one averaging, and decide.

        Args:
            drifts: Relative distances from the mean.
            steps: Steps of all ranks in the round.
        """
        drift = largest_drift(drifts)
        if not math.isfinite(drift):
            self._history.clear()
            text = f"the drift is {drift}: a replica has NaN or inf parameters"
            return GuardDecision(GuardAction.TIGHTEN, text)
        self._history.append((drift, max(1.0, steps)))
        if drift <= self._threshold or not self._is_rising(steps):
            return GuardDecision(GuardAction.STABLE)
        risen = f"the drift rose three times in a row, to {drift:.4g}, over"
        if drift > 2.0 * self._threshold:
            return GuardDecision(GuardAction.TIGHTEN, f"{risen} twice the threshold {self._threshold:g}")
        return GuardDecision(GuardAction.HOLD, f"{risen} the threshold {self._threshold:g}")

    def _is_rising(self, steps: float) -> bool:
        """Whether the last drifts rise beyond the noise of those before, in rounds of so many steps."""
        known = [
            drift * max(1.0, steps / length) for drift, length in self._history if length >= _SHORT * steps
        ]
        before, last = known[:-_RISES], known[-_RISES:]
        if len(last) < _RISES or not all(a < b for a, b in itertools.pairwise(last)):
            return False
        return not before or last[-1] > 2.0 * max(before) - min(before)


def lead_limits(done: Sequence[int], movable: Sequence[bool], max_batch_diff: int) -> list[int | None]:
    """Numbers of steps since the last mean at which the ranks are to be held.

    A rank may start a step while its lead is at most `max_batch_diff`, so 0 is lockstep and the lead is never
    more than one above it.

    Args:
        done: Steps since the last mean that each rank has taken. Shape (ranks,).
        movable: Whether each rank has batches to train, or may get some. Shape (ranks,).
        max_batch_diff: Limit of the lead.

    Returns:
        The number of each rank; None where it has no other to wait for. Shape (ranks,).
    """
    slowest = nsmallest(2, ((steps, rank) for rank, steps in enumerate(done) if movable[rank]))
    limits: list[int | None] = [slowest[0][0] + max_batch_diff + 1 if slowest else None] * len(done)
    if slowest:  # which does not wait for itself
        limits[slowest[0][1]] = slowest[1][0] + max_batch_diff + 1 if len(slowest) > 1 else None
    return limits


class Overshoot:
    """Steps past its quota that a rank may run when it does not wait for the mean.

    Without a limit of the user's it starts at a hundredth of the run's batches (2 to 5), grows by one with
    every averaging after which the replicas are stable, up to a fiftieth (3 to 10), and falls back to the
    start when the guard tightens.

    Args:
        total_batches: Batches of an epoch.
        limit: The user's own number of steps; nothing is tuned then.

    Attributes:
        value: Steps past the quota that are allowed now.
    """

    def __init__(self, total_batches: int, limit: int | None = None) -> None:
        self._initial = min(max(total_batches // 100, 2), 5) if limit is None else limit
        self._cap = min(max(total_batches // 50, 3), 10) if limit is None else limit
        self.value = self._initial

    def averaged(self, action: GuardAction) -> None:
        """Take in the guard's action at an averaging."""
        if action is GuardAction.STABLE:
            self.value = min(self.value + 1, self._cap)
        elif action is GuardAction.TIGHTEN:
            self.value = self._initial
