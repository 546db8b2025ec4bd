"""Drift of the replicas, and the guard that answers it.

The drift of a rank is ||replica - mean|| / ||mean||, taken just before the mean replaces the replica. The
guard looks at the largest over the ranks, before the quotas of the next round are made.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DivergenceGuard", "GuardAction", "GuardDecision", "largest_drift"]

_HISTORY = 5
_RISES = 3


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

    Three strictly rising values with the last over the threshold hold the anchor, over twice the threshold
    they halve it. A drift that is NaN or infinite halves it at once.

    Args:
        threshold: Relative distance from the mean.
        enabled: False: always stable.
        history: Largest drifts of an earlier run; see `history`.
    """

    def __init__(self, threshold: float = 0.05, enabled: bool = True, history: Sequence[float] = ()) -> None:
        self._threshold = threshold
        self._enabled = enabled
        self._history: deque[float] = deque(history, maxlen=_HISTORY)

    @property
    def history(self) -> tuple[float, ...]:
        """The last largest drifts, at most five, oldest first."""
        return tuple(self._history)

    def report(self, drifts: Sequence[float]) -> GuardDecision:
        """Take in the drift of each rank in one averaging, and decide."""
        drift = largest_drift(drifts)
        if not self._enabled:
            return GuardDecision(GuardAction.STABLE)
        self._history.append(drift)
        if not math.isfinite(drift):
            text = f"the drift is {drift}: a replica has NaN or inf parameters"
            return GuardDecision(GuardAction.TIGHTEN, text)
        if not self._is_rising() or drift <= self._threshold:
            return GuardDecision(GuardAction.STABLE)
        risen = f"the drift rose three times in a row, to {drift:.4g}, over"
        if drift > 2.0 * self._threshold:
            return GuardDecision(GuardAction.TIGHTEN, f"{risen} twice the threshold {self._threshold:g}")
        return GuardDecision(GuardAction.HOLD, f"{risen} the threshold {self._threshold:g}")

    def _is_rising(self) -> bool:
        last = self.history[-_RISES:]
        return len(last) == _RISES and all(a < b for a, b in itertools.pairwise(last))
