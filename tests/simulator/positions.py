"""What every position of a run has: its counts, its open epochs and what is left of them agree."""

from __future__ import annotations

import math

from flowdp.protocol.position import OpenEpoch, Position

__all__ = ["check_position"]


def check_position(position: Position) -> None:
    """Check a position.

    Raises:
        ValueError: No run can stand there.
    """
    counts = (position.done, position.global_step, position.round, position.planned, position.versions)
    _demand(position.world_size >= 1 and min(counts) >= 0, "a count is negative")
    _demand(len(position.pace_ms) in (0, position.world_size), "pace_ms has not one time per rank")
    _demand(all(0 <= ms < math.inf for ms in position.pace_ms), "pace_ms holds a value that is no time")
    if position.owed_epoch is not None:
        is_last = position.owed_epoch.epoch == position.done - 1
        _demand(is_last and position.owed_epoch.owes_evaluation, "owed_epoch is not the last complete epoch")
        _demand(not position.owed_step, "an evaluation of an epoch and one by steps are owed")
    epochs = [one.epoch for one in position.open]
    _demand(epochs == list(range(position.done, position.done + len(epochs))), f"open epochs are {epochs}")
    for one in position.open:
        _check_open(one, position.world_size)


def _check_open(one: OpenEpoch, world_size: int) -> None:
    missing = one.missing
    _demand(len(one.left) == len(one.sums) == world_size, "not one entry per rank")
    _demand(all(0 <= batch < one.position for batch in missing), "a batch is left that was not dealt")
    _demand(len(set(missing)) == len(missing), "a batch is left twice")


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
