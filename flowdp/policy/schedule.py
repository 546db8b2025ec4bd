"""Position of a step in the run, and the factor of the learning rate."""

from __future__ import annotations

from typing import Literal

__all__ = ["LrScaling", "lr_factor", "position", "warm_up_factor"]

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
