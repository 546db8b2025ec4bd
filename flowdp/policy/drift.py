"""How far the replicas stand apart, and what to do about it.

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

__all__ = ["DivergenceGuard", "DriftReport", "GuardAction", "GuardDecision"]

_HISTORY = 5
_RISES = 3


class GuardAction(enum.Enum):
    """What the guard asks of the cadence."""

    STABLE = "stable"
    """Nothing."""
    HOLD = "hold"
    """Do not let the anchor grow."""
    TIGHTEN = "tighten"
    """Halve the anchor: average sooner."""


@dataclass(frozen=True, slots=True)
class GuardDecision:
    """What the guard asks, and why.

    Attributes:
        action: What to do.
        reason: Why, as a sentence with the figures.
    """

    action: GuardAction
    reason: str


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Distances from the mean of one averaging.

    Attributes:
        drifts: ||replica - mean|| / ||mean|| per rank. Shape (ranks,).
        pre_norms: ||replica|| per rank, or None where not measured. Shape (ranks,).
        post_norm: ||mean||, or None where not measured.
    """

    drifts: tuple[float, ...]
    pre_norms: tuple[float, ...] | None = None
    post_norm: float | None = None

    @property
    def max_drift(self) -> float:
        """Largest drift; 0 without any, NaN where one is NaN."""
        # max() would drop a NaN or return it, depending on its place.
        if any(math.isnan(drift) for drift in self.drifts):
            return math.nan
        return max(self.drifts, default=0.0)

    @property
    def cosine_similarities(self) -> tuple[float, ...] | None:
        """Cosine of the angle between replica and mean per rank; None without the norms.

        A vector of length zero has no direction: 0.

        Source: law of cosines, with drift x ||mean|| as the third side.
        """
        if self.pre_norms is None or self.post_norm is None:
            return None
        post = self.post_norm
        return tuple(
            min(max((pre**2 + post**2 - (drift * post) ** 2) / (2.0 * pre * post), -1.0), 1.0)
            if pre * post > 0.0
            else 0.0
            for drift, pre in zip(self.drifts, self.pre_norms, strict=True)
        )

    @property
    def magnitude_shifts(self) -> tuple[float, ...] | None:
        """||replica|| - ||mean|| per rank; None without the norms."""
        if self.pre_norms is None or self.post_norm is None:
            return None
        return tuple(pre - self.post_norm for pre in self.pre_norms)


class DivergenceGuard:
    """Watches the largest drift and answers with what the cadence should do.

    Three strictly rising values with the last over the threshold hold the anchor, over twice the threshold
    they halve it. A drift that is NaN or infinite halves it at once.

    Args:
        threshold: Relative distance from the mean.
        enabled: False: always stable.
        history: What an earlier run had seen; see `history`.
    """

    def __init__(self, threshold: float = 0.05, enabled: bool = True, history: Sequence[float] = ()) -> None:
        self._threshold = threshold
        self._enabled = enabled
        self._history: deque[float] = deque(history, maxlen=_HISTORY)

    @property
    def history(self) -> tuple[float, ...]:
        """The last largest drifts, at most five, oldest first."""
        return tuple(self._history)

    def report(self, report: DriftReport) -> GuardDecision:
        """Take in one averaging and decide."""
        if not self._enabled:
            return GuardDecision(GuardAction.STABLE, "the divergence guard is switched off")
        drift = report.max_drift
        self._history.append(drift)
        if not math.isfinite(drift):
            return GuardDecision(
                GuardAction.TIGHTEN, f"the drift is {drift}: a replica has NaN or inf parameters"
            )
        if not self._is_rising():
            return GuardDecision(GuardAction.STABLE, f"drift {drift:.4g} has not risen three times in a row")
        risen = f"the drift rose three times in a row, to {drift:.4g}"
        if drift > 2.0 * self._threshold:
            return GuardDecision(
                GuardAction.TIGHTEN, f"{risen}, over twice the threshold {self._threshold:g}"
            )
        if drift > self._threshold:
            return GuardDecision(GuardAction.HOLD, f"{risen}, over the threshold {self._threshold:g}")
        return GuardDecision(GuardAction.STABLE, f"{risen}, within the threshold {self._threshold:g}")

    def _is_rising(self) -> bool:
        last = self.history[-_RISES:]
        return len(last) == _RISES and all(a < b for a, b in itertools.pairwise(last))
