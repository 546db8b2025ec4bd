"""Lead: how far a rank may run ahead.

The lead of a rank is the number of steps it has taken since the last mean, beyond the slowest rank that can
still move. A rank without data, or one that has left, holds no other back: waiting for it would never end.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from flowdp.policy.drift import GuardAction

__all__ = ["Overshoot", "lead_limits"]


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
    """

    def __init__(self, total_batches: int, limit: int | None = None) -> None:
        self._initial = min(max(total_batches // 100, 2), 5) if limit is None else limit
        self._cap = min(max(total_batches // 50, 3), 10) if limit is None else limit
        self._value = self._initial

    @property
    def value(self) -> int:
        """Steps past the quota that are allowed now."""
        return self._value

    def averaged(self, action: GuardAction) -> None:
        """Take in the guard's action at an averaging."""
        if action is GuardAction.STABLE:
            self._value = min(self._value + 1, self._cap)
        elif action is GuardAction.TIGHTEN:
            self._value = self._initial
