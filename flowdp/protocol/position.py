"""Position of a run between two rounds, as plain data: the coordinator's state in a checkpoint.

It is taken while every rank stands still and nothing is dealt, so a position in an epoch is one integer and
a short list. `machine.event_log` writes it as JSON and reads it back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flowdp.policy.monitor import Best
from flowdp.policy.tally import EpochMetrics, RankSums

__all__ = ["Best", "OpenEpoch", "Position", "check_types"]


@dataclass(frozen=True, slots=True)
class OpenEpoch:
    """An epoch that has begun and is not complete.

    Attributes:
        epoch: Index of the epoch.
        position: First batch that was never dealt.
        left: Earlier batches that were not trained, per rank. Shape (world_size, ...).
        sums: The ranks' sums of it. Shape (world_size,).
        rounds: Averagings in it.
        sync_ms: Time of all of them.
        divergence: Largest drift; None where not measured.
        spent_ms: Wall time in it.
    """

    epoch: int
    position: int
    left: tuple[tuple[int, ...], ...]
    sums: tuple[RankSums, ...]
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

    def check(self) -> None:
        """Check a position that was read from a file.

        Raises:
            ValueError: A field is of another type, or out of its range; the message names it.
        """
        check_types(self, Position, "position")
        counts = (self.done, self.global_step, self.round, self.planned, self.versions, self.best.bad)
        _demand(self.world_size >= 1 and min(counts) >= 0, "a count is negative")
        _demand(self.best.epoch >= -1, "best.epoch is negative")
        _demand(self.anchor is None or self.anchor >= 0, "anchor is negative")
        _demand(len(self.pace_ms) in (0, self.world_size), "pace_ms has not one time per rank")
        _demand(all(0 <= ms < math.inf for ms in self.pace_ms), "pace_ms holds a value that is no time")
        if self.owed_epoch is not None:
            is_last = self.owed_epoch.epoch == self.done - 1
            _demand(is_last and self.owed_epoch.owes_evaluation, "owed_epoch is not the last complete epoch")
            _demand(not self.owed_step, "an evaluation of an epoch and one by steps are owed")
        epochs = [one.epoch for one in self.open]
        _demand(epochs == list(range(self.done, self.done + len(epochs))), f"open epochs are {epochs}")
        for one in self.open:
            self._check_open(one)

    def _check_open(self, one: OpenEpoch) -> None:
        where = f"epoch {one.epoch}: "
        missing = one.missing
        _demand(len(one.left) == len(one.sums) == self.world_size, where + "not one entry per rank")
        _demand(one.position >= 0 and one.rounds >= 0, where + "a count is negative")
        _demand(
            all(0 <= batch < one.position for batch in missing), where + "a batch is left that was not dealt"
        )
        _demand(len(set(missing)) == len(missing), where + "a batch is left twice")
        _demand(0 <= one.sync_ms < math.inf and 0 <= one.spent_ms < math.inf, where + "a time is none")
        for sums in one.sums:
            times = (sums.busy_ms, sums.data_ms, sums.wait_ms, sums.sync_ms)
            _demand(all(0 <= ms < math.inf for ms in times), where + "a time is none")
            _demand(min(sums.steps, sums.samples, sums.losses[1]) >= 0, where + "a count is negative")


def check_types(value: object, kind: Any, where: str) -> None:
    """Check that each field of a record read from a file has the type of its annotation.

    Args:
        value: The record, or a part of it.
        kind: A dataclass, or the annotation of a part.
        where: Its name in the error.

    Raises:
        ValueError: It does not; an int may stand for a float.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        _demand(type(value) is kind, f"{where} is a {type(value).__name__}, not a {kind.__name__}")
        hints = get_type_hints(kind)
        for part in fields(kind):
            check_types(getattr(value, part.name), hints[part.name], f"{where}.{part.name}")
    elif origin is UnionType:
        if value is not None or type(None) not in parts:
            [kind] = [part for part in parts if part is not type(None)]
            check_types(value, kind, where)
    elif origin is tuple:
        items = value if isinstance(value, tuple) else None
        if items is not None and parts[-1] is Ellipsis:
            parts = (parts[0],) * len(items)
        if items is None or len(items) != len(parts):
            raise ValueError(f"{where} is {value!r:.80}, not {kind}")
        for number, (item, part) in enumerate(zip(items, parts, strict=True)):
            check_types(item, part, f"{where}[{number}]")
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r:.80}, not {kind}")
        for key, item in value.items():
            check_types(key, parts[0], where)
            check_types(item, parts[1], f"{where}[{key!r}]")
    else:
        fits = type(value) in ((int, float) if kind is float else (kind,))
        _demand(fits, f"{where} is {value!r:.80}, not {kind.__name__}")


def _demand(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
