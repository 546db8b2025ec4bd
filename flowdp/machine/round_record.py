"""Round records for callbacks and logs, made of the ranks' reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowdp.policy.tally import joined_norms, mean_and_largest
from flowdp.protocol.commands import RoundEnded
from flowdp.protocol.messages import Outcome, Work

__all__ = ["ShareChanges", "mean_loss", "reason_of", "round_ended"]

MOVED = 0.02
"""Change of a share that is reported: quotas are whole steps, and vary by one."""


def mean_loss(works: Sequence[Work]) -> float | None:
    """Mean over the samples of several pieces of work; None without any."""
    samples = sum(work.losses[1] for work in works)
    return math.fsum(work.losses[0] for work in works) / samples if samples else None


def round_ended(
    works: Sequence[Sequence[Work]],
    *,
    round: int,
    rounds: int,
    epoch: int,
    global_step: int,
    steps: Sequence[int],
    samples: Sequence[int],
    last: Work | None,
    wall_ms: float,
    wait_ms: Sequence[float],
    sync_ms: float,
    anchor: int,
    drift: float | None,
    reason: str,
    param_norm: float | None = None,
    share: Sequence[float] = (),
) -> RoundEnded:
    """Make the record of a round, or of the rounds of one order together.

    `works` are the reports of each rank since the record before, shape (world_size, reports); `last` is the
    one whose learning rates are the record's; the rest are fields of `RoundEnded`.
    """
    norms = joined_norms(work.norms for theirs in works for work in theirs)
    grad_norm, grad_norm_max = mean_and_largest(norms)
    return RoundEnded(
        round=round,
        rounds=rounds,
        epoch=epoch,
        global_step=global_step,
        steps=tuple(steps),
        samples=tuple(samples),
        loss=mean_loss([work for theirs in works for work in theirs]),
        lr=0.0 if last is None else last.lr,
        group_lrs={} if last is None else last.group_lrs,
        wall_ms=wall_ms,
        busy_ms=tuple(math.fsum(work.busy_ms for work in theirs) for theirs in works),
        data_ms=tuple(math.fsum(work.data_ms for work in theirs) for theirs in works),
        wait_ms=tuple(wait_ms),
        sync_ms=sync_ms,
        anchor=anchor,
        drift=drift,
        reason=reason,
        grad_norm=grad_norm,
        grad_norm_max=grad_norm_max,
        param_norm=param_norm,
        share=tuple(share),
    )


class ShareChanges:
    """The shares that a record has reported last.

    Args:
        world_size: Ranks; they begin with equal shares.
    """

    def __init__(self, world_size: int) -> None:
        self._reported: tuple[float, ...] = (1.0 / world_size,) * world_size

    def report(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Shares in proportion to these weights, where they differ from those reported last; else empty."""
        whole = math.fsum(weights)
        shares = tuple(weight / whole for weight in weights) if whole else ()
        moved = [abs(one - two) for one, two in zip(self._reported, shares, strict=False)]
        if max(moved, default=0.0) < MOVED:
            return ()
        self._reported = shares
        return shares


def reason_of(outcome: Outcome) -> str:
    """The reason why a round was no ordinary one; "" for an ordinary one."""
    if outcome.left:
        return f"rank {', '.join(map(str, outcome.left))} left"
    if outcome.bad:
        return f"rank {', '.join(map(str, outcome.bad))} had NaN or inf parameters"
    wishes = {"stop": outcome.stop, "pause": outcome.pause, "halt": outcome.halt, "hurried": outcome.hurried}
    return next((wish for wish, is_there in wishes.items() if is_there), "")
