"""Watching one number of the epochs: which was the best one, and when is it enough.

Decided here once, for early stopping, for the best checkpoint and for the run's answer alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from flowdp.errors import OptionError
from flowdp.policy.formats import format_epochs, format_metric
from flowdp.policy.tally import EpochMetrics
from flowdp.validators import check_int, check_number

__all__ = ["Best", "Monitor", "judge", "number_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Best:
    """Best value of a monitored number.

    Attributes:
        value: The best one so far; None before the first.
        epoch: When; -1 before the first.
        bad: Judged epochs since.
    """

    value: float | None = None
    epoch: int = -1
    bad: int = 0


@dataclass(frozen=True, slots=True)
class Monitor:
    """Number to watch, and the direction that is better.

    Attributes:
        name: Name of a mean of the evaluation, else "loss" or the name of a scalar of the training.
        mode: Whether the least or the greatest is best.
        patience: Judged epochs in a row without a better one after which the run stops; None: never.
        min_delta: By how much a value must be better than the best one to count.
    """

    name: str
    mode: Literal["min", "max"]
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: One is out of its range.
        """
        if not isinstance(self.name, str) or not self.name:
            raise OptionError(f"monitor must be the name of a metric, such as 'loss', not {self.name!r}")
        if self.mode not in ("min", "max"):
            raise OptionError(f"mode must be 'min' or 'max', not {self.mode!r}")
        check_int("patience", self.patience, optional=True)
        check_number("min_delta", self.min_delta, above=False)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value beats the best one so far, or is the first; NaN and infinity never do."""
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    def best_of(self, valued: Iterable[tuple[float | None, T]], count: int) -> list[tuple[float, T]]:
        """The best few of several things with their values, the best first; of equal ones the earlier first.

        Those without a value, or with one that is NaN or infinite, are never among them.

        Args:
            valued: Value and thing, in the order in which they came.
            count: How many at most.
        """
        finite = [(value, one) for value, one in valued if value is not None and math.isfinite(value)]
        finite.sort(key=lambda pair: pair[0], reverse=self.mode == "max")
        return finite[:count]

    def is_enough(self, best: Best) -> bool:
        """Whether the run shall end: the number has not improved for `patience` judged epochs."""
        return self.patience is not None and best.bad >= self.patience

    def reason(self, best: Best) -> str:
        """Reason of a run's end by this monitor, in words."""
        than = "" if best.value is None else f" better than {format_metric(best.value)}"
        return f"early stopping, no {self.name!r}{than} in {format_epochs(best.bad)}"


def number_of(name: str, metrics: EpochMetrics, *, evaluates: bool = False) -> float | None:
    """The number of an epoch with this name: of its evaluation, else of its training; None without one.

    Where the run has an evaluation, an epoch without one (`eval_every`) has none: the name may mean the
    evaluation's number, and the training's of the same name cannot be compared with it.

    Args:
        name: Name of the number.
        metrics: Record of the epoch.
        evaluates: The run has an evaluation, at the end of some epochs.
    """
    return None if evaluates and not metrics.is_evaluated else _numbers(metrics).get(name)


def judge(best: Best, monitor: Monitor, metrics: EpochMetrics, *, evaluates: bool) -> tuple[Best, str | None]:
    """Judge an epoch; returns the best value behind it, of this epoch where it is the best one so far.

    The error in words is returned, too, where the epoch cannot be judged and a later one will not be either.
    Where the run has an evaluation, epochs without one are not judged; see `number_of`.

    Args:
        best: Best value before it.
        monitor: Number to watch.
        metrics: Record of the epoch.
        evaluates: The run has an evaluation, at the end of some epochs.
    """
    value = number_of(monitor.name, metrics, evaluates=evaluates)
    if value is None:
        # A scalar that was there once may be recorded now and then; only one that never was is a wrong name.
        is_known = best.epoch >= 0 or best.bad > 0 or (evaluates and not metrics.is_evaluated)
        return best, None if is_known else _unknown(monitor.name, metrics)
    if monitor.is_better(value, best.value):
        return Best(value, metrics.epoch), None
    return Best(best.value, best.epoch, best.bad + 1), None


def _numbers(metrics: EpochMetrics) -> dict[str, float]:
    loss = {} if metrics.loss is None else {"loss": metrics.loss}
    return {**loss, **metrics.scalars, **metrics.eval}


def _unknown(name: str, metrics: EpochMetrics) -> str:
    known = ", ".join(map(repr, _numbers(metrics))) or "no numbers"
    if name in metrics.eval_arrays:
        shape = metrics.eval_arrays[name].shape
        return (
            f"{name!r} in epoch {metrics.epoch + 1} has shape {shape}, and one number is monitored: {known}"
        )
    return f"nothing in epoch {metrics.epoch + 1} is called {name!r}, which is monitored; there are {known}"
