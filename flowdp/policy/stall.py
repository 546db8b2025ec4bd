"""Detection of a stalled run.

A lock that is never released, or a read of the dataset that never returns, shows only in counters that stay
the same. How long is too long depends on the steps: a step of a minute is no stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = ["StallWatch", "Verdict"]

Verdict = Literal["moves", "warn", "stall"]

LONGEST_STEPS = 10
"""The counters may stay the same for as long as so many of the longest steps."""

LOOKS = 4
"""Looks in the time that is allowed, at least ..."""

INTERVAL_MS = 400.0
"""... and the longest time between two: a stall is noticed so much late at most."""


class StallWatch:
    """Looks at a run now and then, and says when nothing has moved for too long.

    Only time between two looks counts, and of a look that comes much later than asked only twice the time
    that was asked for: a machine that slept was not a stall.

    Args:
        timeout_ms: How long nothing may move, or 10 longest steps where that is more; None: for ever.

    Attributes:
        limit_ms: How long nothing may move, as the last look found it.
        still_ms: How long nothing had moved at the last look.
    """

    def __init__(self, timeout_ms: float | None) -> None:
        self._timeout_ms = timeout_ms
        self.limit_ms = timeout_ms or 0.0
        self.still_ms = 0.0
        self._due_ms: float | None = None if timeout_ms is None else 0.0
        self._looked_ms: float | None = None
        self._warned_ms = 0.0  # `still_ms` at the last warning
        self._seen: tuple[object, ...] = ()

    def deadline_ms(self) -> float | None:
        """Time of the next look; None: never again."""
        return self._due_ms

    def look(
        self,
        now_ms: float,
        progress: Sequence[int],
        *,
        all_started: bool,
        may_idle: bool,
        longest_ms: float,
    ) -> Verdict:
        """Look at the run's counters.

        Args:
            now_ms: The time.
            progress: Counters of all that moves; how many they are does not change.
            all_started: Whether every rank has ended its first step: before, a device or a dataset may take
                as long as it likes to get going.
            may_idle: Whether the ranks may be idle, as in a pause.
            longest_ms: The longest step so far.

        Returns:
            "stall" once: nothing has moved for too long. "warn" in its place while that may have its reason,
            again after as long once more. Else "moves".
        """
        if self._timeout_ms is None:
            return "moves"
        self.limit_ms = max(self._timeout_ms, LONGEST_STEPS * longest_ms)
        interval_ms = min(self.limit_ms / LOOKS, INTERVAL_MS)
        passed_ms = 0.0 if self._looked_ms is None else now_ms - self._looked_ms
        self._looked_ms, self._due_ms = now_ms, now_ms + interval_ms
        # The end of a pause starts the clock anew: the ranks need their time to move again.
        seen = (all_started, may_idle, *progress)
        if seen != self._seen:
            self._seen, self.still_ms, self._warned_ms = seen, 0.0, 0.0
            return "moves"
        self.still_ms += min(max(passed_ms, 0.0), 2 * interval_ms)
        if self.still_ms - self._warned_ms < self.limit_ms:
            return "moves"
        if all_started and not may_idle:
            self._due_ms = None
            return "stall"
        self._warned_ms = self.still_ms
        return "warn"
