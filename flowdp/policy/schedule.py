"""Consequences of the number of a step: position in the run, factor of the learning rate, due checks."""

from __future__ import annotations

from typing import Literal

__all__ = ["LrScaling", "Recheck", "is_due_at", "lr_factor", "position", "warm_up_factor"]

LrScaling = Literal["linear", "sqrt"] | float


def position(global_step: int, i: int, steps: int, quota: int) -> int:
    """Position in the run of a rank's own step inside a round.

    A rank that takes `quota` of the round's steps spreads them evenly over all of them, so a schedule sees
    the same curve on any number of devices.

    Args:
        global_step: Steps of all ranks before the round.
        i: Own step in the round, from 0.
        steps: Steps of all ranks in the round.
        quota: Steps of this rank in the round, at least 1.
    """
    return global_step + i * steps // quota


def lr_factor(scaling: LrScaling, world_size: int) -> float:
    """Multiplier of the learning rate for a number of devices.

    Args:
        scaling: "linear" is `world_size`, "sqrt" its square root; a number r is 1 + r * (world_size - 1).
        world_size: Devices.
    """
    if scaling == "sqrt":
        return float(world_size**0.5)
    ratio = 1.0 if scaling == "linear" else scaling
    return 1.0 + ratio * (world_size - 1)


def warm_up_factor(position: int, steps: int) -> float:
    """Multiplier of the learning rate in a warm-up: a straight line to 1 at its last step.

    Args:
        position: Steps of all ranks before this one.
        steps: Steps of the warm-up; 0: there is none.
    """
    return min(1.0, (position + 1) / steps) if steps else 1.0


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
