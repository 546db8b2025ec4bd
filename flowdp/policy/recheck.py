"""Checks that come back at growing distances."""

from __future__ import annotations

__all__ = ["Recheck", "is_due_at"]

EVERY = 500
"""Steps between two checks, at most."""


def is_due_at(number: int, every: int = EVERY) -> bool:
    """Whether a check is due at the step of this number, from 1: at 1, 2, 4, 8, ..., and every 500th."""
    return number & (number - 1) == 0 or number % every == 0


class Recheck:
    """A check that is due at the times 1, 2, 4, 8, ..., and every 500th.

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
