"""Position of a run between two rounds, as plain data: the coordinator's state in a checkpoint.

It is taken while every rank stands still and nothing is dealt, so a position in an epoch is one integer and
a short list. `encode` and `decode` write it as JSON and read it back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from flowdp.policy import tally
from flowdp.policy.monitor import Best
from flowdp.policy.tally import EpochMetrics, Work

__all__ = ["Best", "OpenEpoch", "Position", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """An epoch that has begun and is not complete.

    Attributes:
        epoch: Index of the epoch.
        position: First batch that was never dealt.
        left: Earlier batches that were not trained, per rank. Shape (world_size, ...).
        sums: Work of each rank in it. Shape (world_size,).
        rounds: Averagings in it.
        sync_ms: Time of all of them.
        divergence: Largest drift; None where not measured.
        spent_ms: Wall time in it.
    """

    epoch: int
    position: int
    left: tuple[tuple[int, ...], ...]
    sums: tuple[Work, ...]
    rounds: int = 0
    sync_ms: float = 0.0
    divergence: float | None = None
    spent_ms: float = 0.0

    @property
    def missing(self) -> tuple[int, ...]:
        """Batches before `position` that were not trained, ascending."""
        return tuple(sorted(batch for hand in self.left for batch in hand))


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run.

    Attributes:
        world_size: Ranks of the run.
        done: Complete epochs.
        open: Those under way, in order; the first of them is epoch `done`.
        global_step: Steps of all ranks.
        round: Number of the next round.
        planned: Steps of the complete epochs, as `max_steps` counts them.
        metric: Loss of the last complete epoch, where a scheduler waits for it.
        versions: Checkpoints so far, this one included.
        anchor: Steps of the slowest rank that the cadence aims at; None without a cadence.
        pace_ms: Time of one step per rank; 0 where not measured. Shape (world_size,).
        best: Best value of early stopping's metric.
        drifts: The last largest drifts that the divergence guard has seen, oldest first.
        owed_epoch: Record of the last complete epoch, where a stop came before the end of its evaluation.
        owed_step: An evaluation by steps is due here, and a stop came before its end.
    """

    world_size: int
    done: int = 0
    open: tuple[OpenEpoch, ...] = ()
    global_step: int = 0
    round: int = 0
    planned: int = 0
    metric: float | None = None
    versions: int = 0
    anchor: int | None = None
    pace_ms: tuple[float, ...] = ()
    best: Best = field(default_factory=Best)
    drifts: tuple[float, ...] = ()
    owed_epoch: EpochMetrics | None = None
    owed_step: bool = False

    @property
    def last_epoch(self) -> int:
        """Epoch of the last step, 0 before the first one."""
        begun = [one.epoch for one in self.open if len(one.missing) < one.position]
        return max((0, self.done - 1, *begun))

    def remaining(self, epoch: int) -> tuple[int, tuple[int, ...]] | None:
        """Untrained batches of an epoch: all from the first number on, and these before it.

        None where the epoch is complete.
        """
        if epoch < self.done:
            return None
        for one in self.open:
            if one.epoch == epoch:
                return one.position, one.missing
        return 0, ()


# ---------------------------------------------------------------- records as JSON
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (Best, OpenEpoch, Position, *vars(tally).values())
    if isinstance(record, type) and is_dataclass(record)
}
"""Everything that may be a part of a position or a history, by its name."""


def encode(value: object) -> Any:
    """A record as JSON values: `{name: {field: value}}`, so that every object has one key, its type.

    A mapping is `{"dict": ...}`, a float that JSON does not know `{"float": "nan"}`.

    Raises:
        TypeError: The value is no record, nor can it be part of one.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": {name: encode(item) for name, item in value.items()}}
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"no record of a run can hold {value!r}")
    return {name: {part.name: encode(getattr(value, part.name)) for part in fields(RECORDS[name])}}


def decode(data: Any) -> Any:
    """The record that `encode` made this of; sequences become tuples.

    Raises:
        ValueError: It is not the work of `encode`.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"an encoded object has one key, its type, not {sorted(data)}")
    [(name, value)] = data.items()
    if name == "float":
        return float(value)
    if name != "dict" and name not in RECORDS:
        raise ValueError(f"no record is named {name!r}")
    parts = {key: decode(item) for key, item in value.items()}
    try:
        return parts if name == "dict" else RECORDS[name](**parts)
    except TypeError as error:
        raise ValueError(f"{name} of another version: {error}") from error
