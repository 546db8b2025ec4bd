"""Position of a step in the run, and the factor of the learning rate."""

from __future__ import annotations

__all__ = ["lr_factor", "position", "total_steps"]


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


def lr_factor(ratio: float, world_size: int) -> float:
    """Multiplier of the learning rate: 1 at ratio 0, `world_size` at ratio 1."""
    return 1.0 + ratio * (world_size - 1)


def total_steps(samples: int, batch_size: int, epochs: int, drop_last: bool) -> int:
    """Steps of all ranks in a whole run, the same for any number of devices.

    Args:
        samples: Length of the dataset.
        batch_size: Samples of one step.
        epochs: Epochs of the run.
        drop_last: Whether the short last batch of an epoch is left out.
    """
    batches = samples // batch_size if drop_last else -(-samples // batch_size)
    return epochs * batches
