"""Checks that come back at growing distances."""

from __future__ import annotations

__all__ = ["Recheck", "is_due_at"]


def is_due_at(number: int) -> bool:
    """Whether a check is due at the step of this number, from 1: at the 1st, the 2nd, the 4th, the 8th."""
    return number & (number - 1) == 0


class Recheck:
    """A check that is due at the 1st, the 2nd, the 4th, the 8th time, and so on.

    Times that failed do not count. In a notebook a cell that failed is run again, and must not come through
    because the check has been there.
    """

    def __init__(self) -> None:
        self._passed = 0

    @property
    def is_due(self) -> bool:
        """Whether it is due now."""
        return is_due_at(self._passed + 1)

    def passed(self) -> None:
        """Count a time that went well, with the check or without it."""
        self._passed += 1
