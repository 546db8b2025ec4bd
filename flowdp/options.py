"""Records of options, checked when they are made.

Bad values raise `OptionError` here, before a thread starts; nothing below this layer checks them again.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal, get_args

from flowdp.errors import OptionError

__all__ = [
    "Backend",
    "Buffers",
    "CadenceOptions",
    "CaptureOptions",
    "CheckpointOptions",
    "CheckpointUnit",
    "LoopBackend",
    "OnFailure",
    "OnNan",
    "Policy",
    "Precision",
    "SchedulerUnit",
    "one_of",
]

Policy = Literal["sync", "cadence", "async", "exact"]
Backend = Literal["auto", "nccl", "local", "cpu"]
LoopBackend = Literal["auto", "nccl", "local"]
Precision = Literal["32", "bf16", "fp16"]
SchedulerUnit = Literal["step", "epoch"]
OnFailure = Literal["raise", "continue"]
OnNan = Literal["quarantine", "raise"]
Buffers = Literal["broadcast", "average"]
CheckpointUnit = Literal["epoch", "step", "minute"]


def one_of(name: str, given: object, literal: object) -> None:
    """Check a word against the words of a `Literal`.

    Raises:
        OptionError: `given` is not one of them.
    """
    words = get_args(literal)
    if given not in words:
        listed = ", ".join(repr(word) for word in words)
        raise OptionError(f"{name} must be one of {listed}, not {given!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class CadenceOptions:
    """How often the replicas meet.

    ::

        CadenceOptions()                           # anchor 10, averaging kept below 10 % of compute
        CadenceOptions(anchor=4, max_anchor=4)     # the slowest rank always takes 4 steps a round
        CadenceOptions(max_batch_diff=0)           # lockstep: one step of every rank, then the mean
        CadenceOptions(speed_hint=(1, 2.5))        # rank 1 is the slow one, the others 2.5 times faster

    Attributes:
        anchor: Steps of the slowest rank in a round, at first and at least.
        overhead_target: Averaging time over compute time to stay below, 0.01 to 0.5.
        max_anchor: Most steps of the slowest rank in a round. None is 200; 0 switches windows off: every
            step is averaged, as under `policy="sync"`.
        max_batch_diff: Most steps by which a rank may lead the slowest that can still move. 0 is lockstep;
            None is no limit in planned rounds and the automatic overshoot limit under `policy="async"`.
        speed_hint: (slow rank, ratio >= 1): how many times faster the other ranks are, until measured.
        divergence_threshold: Relative distance of a replica from the mean above which three rising
            values in a row hold the anchor; above twice this value they halve it.
        divergence_guard: False switches the guard off.
    """

    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int | None = None
    max_batch_diff: int | None = None
    speed_hint: tuple[int, float] | None = None
    divergence_threshold: float = 0.05
    divergence_guard: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        if not _is_int(self.anchor) or self.anchor < 1:
            raise OptionError(f"cadence.anchor must be an int of at least 1, not {self.anchor!r}")
        if not _is_number(self.overhead_target) or not 0.01 <= self.overhead_target <= 0.50:
            raise OptionError(f"cadence.overhead_target must lie in 0.01..0.50, not {self.overhead_target!r}")
        if self.max_anchor is not None and (not _is_int(self.max_anchor) or self.max_anchor < 0):
            raise OptionError(
                f"cadence.max_anchor must be None, 0 or a positive int, not {self.max_anchor!r}"
            )
        if self.max_batch_diff is not None and (not _is_int(self.max_batch_diff) or self.max_batch_diff < 0):
            raise OptionError(
                f"cadence.max_batch_diff must be None or an int >= 0, not {self.max_batch_diff!r}"
            )
        if not _is_number(self.divergence_threshold) or not self.divergence_threshold > 0:
            raise OptionError(
                f"cadence.divergence_threshold must be positive, not {self.divergence_threshold!r}"
            )
        if not isinstance(self.divergence_guard, bool):
            raise OptionError(
                f"cadence.divergence_guard must be True or False, not {self.divergence_guard!r}"
            )
        if self.speed_hint is not None:
            self._check_hint(self.speed_hint)

    @staticmethod
    def _check_hint(hint: object) -> None:
        if not isinstance(hint, tuple) or len(hint) != 2 or not _is_int(hint[0]) or hint[0] < 0:
            raise OptionError(f"cadence.speed_hint must be (slow_rank, ratio), not {hint!r}")
        if not _is_number(hint[1]) or hint[1] < 1:
            raise OptionError(
                f"cadence.speed_hint ratio says how many times faster the others are and must be >= 1, "
                f"not {hint[1]!r}"
            )

    @property
    def windows(self) -> bool:
        """Whether rounds of several steps are wanted at all."""
        return self.max_anchor != 0 and self.max_batch_diff != 0


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How steps are captured.

    ::

        CaptureOptions()                     # compared at captured steps 1, 2, 4, 8, ..., and every 500
        CaptureOptions(compare_every=50)     # at least every 50

    Attributes:
        compare_every: Captured steps after which one is run eagerly beside and compared, at the latest.
        graphs: Forms of a micro-batch (structure, shapes, dtypes) that get a graph; others run eagerly.
    """

    compare_every: int = 500
    graphs: int = 4

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        for name in ("compare_every", "graphs"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise OptionError(f"capture.{name} must be an int of at least 1, not {value!r}")


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints are written, how often, and which of them stay.

    ::

        CheckpointOptions("runs/a")                             # after every epoch; the last three stay
        CheckpointOptions("runs/a", every=500, unit="step")     # after the first round that ends 500 steps on
        CheckpointOptions("runs/a", keep_best=("loss", "min"))  # the best one stays, too, as best.pt

    Attributes:
        dir: Folder of this run alone; made where it is not there.
        every: How many units lie between two checkpoints: an int, or of minutes any positive number.
        unit: What `every` counts: epochs, steps of all ranks, or minutes.
        keep_last: How many of the newest stay.
        keep_best: (monitor, "min" or "max"): the one with the best value of this metric stays besides.
    """

    dir: str | Path
    _: KW_ONLY
    every: float = 1
    unit: CheckpointUnit = "epoch"
    keep_last: int = 3
    keep_best: tuple[str, Literal["min", "max"]] | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: A field is out of its range.
        """
        if not isinstance(self.dir, (str, Path)) or not str(self.dir):
            raise OptionError(f"checkpoint.dir must be the path of a folder, not {self.dir!r}")
        one_of("checkpoint.unit", self.unit, CheckpointUnit)
        if self.unit == "minute":
            if not _is_number(self.every) or not self.every > 0:
                raise OptionError(
                    f"checkpoint.every must be a positive number of minutes, not {self.every!r}"
                )
        elif not _is_int(self.every) or self.every < 1:
            raise OptionError(
                f"checkpoint.every must be an int of at least 1 with unit={self.unit!r}, not {self.every!r}"
            )
        if not _is_int(self.keep_last) or self.keep_last < 1:
            raise OptionError(f"checkpoint.keep_last must be an int of at least 1, not {self.keep_last!r}")
        best = self.keep_best
        if best is not None and not (
            isinstance(best, tuple)
            and len(best) == 2
            and isinstance(best[0], str)
            and best[0]
            and best[1] in ("min", "max")
        ):
            raise OptionError(f"checkpoint.keep_best must be (monitor, 'min' or 'max'), not {best!r}")
