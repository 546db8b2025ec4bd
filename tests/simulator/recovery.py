"""The judge of recovery: once a disturbance is over, work is shared as though it had never been."""

from __future__ import annotations

from flowdp.protocol.commands import EpochMetrics, RoundEnded
from tests.simulator.cluster import JudgedWorld
from tests.simulator.violation import Violation

__all__ = ["RECOVERY", "TOLERANCE", "judge_recovery"]

RECOVERY = 48
"""Rounds, or blocks of them, after which the shares are right again."""

TOLERANCE = 0.25
"""Relative difference of a share that counts as none; beside it, one step in each epoch, for rounding."""


def judge_recovery(disturbed: JudgedWorld, calm: JudgedWorld) -> None:
    """Compare the samples per rank of two runs, over the epochs behind the recovery.

    Args:
        disturbed: A run whose scenario has a disturbance, ended.
        calm: The same scenario without it, ended.

    Raises:
        Violation: A rank has another share than without the disturbance.
    """
    records = disturbed.records[disturbed.disturbed_until :]
    rounds = [record for record in records if isinstance(record, RoundEnded)][RECOVERY:]
    if not rounds:
        return
    ranks = range(disturbed.scenario.config.world_size)
    first = rounds[0].epoch + 1
    mine, epochs = _samples(disturbed, first)
    theirs, _ = _samples(calm, first)
    for rank in ranks:
        allowed = TOLERANCE * theirs[rank] + epochs * disturbed.scenario.batch_size
        if abs(mine[rank] - theirs[rank]) > allowed:
            raise Violation(
                "L7",
                f"rank {rank} trains {mine[rank]} samples from epoch {first} on, and {theirs[rank]} in a run "
                f"without the disturbance, which is {RECOVERY} rounds past",
            )


def _samples(world: JudgedWorld, first: int) -> tuple[list[int], int]:
    """Samples per rank from an epoch on, and how many epochs those are."""
    ended = [record for record in world.records if isinstance(record, EpochMetrics)]
    judged = [metrics for metrics in ended if metrics.epoch >= first]
    ranks = range(world.scenario.config.world_size)
    return [sum(metrics.per_rank[rank].samples for metrics in judged) for rank in ranks], len(judged)
