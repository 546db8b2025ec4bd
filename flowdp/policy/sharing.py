"""Whether a step of all ranks is worth sharing, or taken faster by one rank alone.

Sharing a step costs a meeting, and on the CPU the ranks share one interpreter and one memory. A trial tells
how much: an order is held the other way, and the faster way is kept. Trials become rare, so those of a long
step cost nothing that can be measured.
"""

from __future__ import annotations

__all__ = ["Sharing"]

GAIN = 0.95
"""The other way replaces the present one where it takes at most this part of its time."""

FIRST_TRIAL, LAST_TRIAL = 2, 256
"""Orders between two trials: so many at first, twice as many after each that has changed nothing, at most.
Few at first, for a trial that was disturbed, by the file of a checkpoint, has told nothing."""

SMOOTHING = 0.3


class Sharing:
    """Chooses between steps that all ranks share and steps of one rank alone, by their measured time.

    Attributes:
        is_shared: The present way; steps are shared at first.

    Threads: no locks; one owner.
    """

    def __init__(self) -> None:
        self.is_shared = True
        self._ms = 0.0  # of a step, the present way
        self._is_trying = False  # an order of the other way is out
        self._distance = FIRST_TRIAL
        self._orders = 0  # until the next trial

    def plan(self) -> bool:
        """Whether the next order is a trial of the other way."""
        if self._is_trying or not self._ms or self._orders > 0:
            return False
        self._is_trying = True
        return True

    def measured(self, shared: bool, ms: float) -> None:
        """Take in the time of a step of an order that was held.

        Args:
            shared: Whether all ranks shared its steps.
            ms: Milliseconds.
        """
        if shared == self.is_shared:
            self._ms = SMOOTHING * ms + (1.0 - SMOOTHING) * self._ms if self._ms else ms
            self._orders -= 1
            return
        self._is_trying = False
        if ms <= GAIN * self._ms:
            self.is_shared, self._ms, self._distance = shared, ms, FIRST_TRIAL
        else:
            self._distance = min(2 * self._distance, LAST_TRIAL)
        self._orders = self._distance

    def dropped(self) -> None:
        """Forget the orders that are out: they are planned anew."""
        self._is_trying = False
