"""The callback that gives a run's numbers to a logger, under names that are the same for all loggers.

Numbers of the user's (`record_scalar`, keys of a loss or an evaluation) stand behind a prefix, so that none
takes the place of a number of flowdp's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, Protocol, runtime_checkable

from flowdp.errors import OptionError
from flowdp.observe.callbacks import Callback
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded
from flowdp.validators import is_int

__all__ = ["Every", "Log", "Number", "RunLogger", "Setting", "numbers_of"]

Every = Literal["epoch", "round"] | int
Setting = str | int | float | bool | None
Number = int | float

MOST_ELEMENTS = 100
"""Elements of a metric that are written; a larger one is no row of numbers."""

OF_TRAINING = ("loss", "grad_norm", "grad_norm_max")
OF_RUN = ("epoch_ms", "efficiency", "rounds", "sync_ms", "divergence")
OF_RANK = ("loss", "lr", "samples", "steps", "busy_ms", "data_wait_ms", "wait_ms", "sync_ms")
OF_ROUND = (
    "rounds",
    "loss",
    "lr",
    "grad_norm",
    "grad_norm_max",
    "param_norm",
    "drift",
    "wall_ms",
    "sync_ms",
)


@runtime_checkable
class RunLogger(Protocol):
    """Destination of a run's numbers: any object with these three methods, for `Log`.

    Threads:
        The observer's, one call after another. An exception is reported, and does not end the run.
    """

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        """Begin a run, or continue one.

        Args:
            settings: The run's settings, by dotted names: `Run.settings`.
            step: Steps of all ranks before it; 0 for a new run. Numbers of later steps, which a crashed run
                has logged, will come again.
        """

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """Log the numbers of one record.

        Args:
            numbers: Finite or not, by name; see docs/callbacks.md for the names.
            step: Steps of all ranks at its end.
        """

    def end(self, status: str) -> None:
        """Close; the last call of a run.

        Args:
            status: "done", "stopped" or "failed".
        """


class Log(Callback):
    """Callback that gives the numbers of a run to a logger of one's own.

    ::

        class Printer:
            def begin(self, settings, step): print(settings["policy"], "from step", step)
            def log(self, numbers, step): print(step, numbers["train/loss"])
            def end(self, status): print(status)

        flowdp.Trainer(..., callbacks=[flowdp.Log(Printer())])

    Epochs and evaluations are always logged.

    Args:
        logger: An object with the methods of `RunLogger`.
        every: "epoch": epochs alone; "round": every round, too; n: those rounds, too, in which each further n
            steps of all ranks were completed.

    Raises:
        OptionError: The logger lacks a method, or `every` is something else.
    """

    skips_dev_run = True

    def __init__(self, logger: RunLogger, *, every: Every = "epoch") -> None:
        lacking = [name for name in ("begin", "log", "end") if not callable(getattr(logger, name, None))]
        if isinstance(logger, type) or lacking:
            raise OptionError(
                f"a logger is an object with the methods begin(settings, step), log(numbers, step) and "
                f"end(status), not {logger!r}"
            )
        if every not in ("epoch", "round") and (not is_int(every) or every < 1):
            raise OptionError(
                f"every must be 'epoch', 'round' or a number of steps of at least 1, not {every!r}"
            )
        self._logger = logger
        self._steps = every if is_int(every) else 1
        self._reached = 0  # multiples of `_steps` that were completed
        self._run: Any = None  # None where the logger could not begin
        if every != "epoch":  # as a method of the class it would wake the observer with every round
            self.on_round = self._log_round  # type: ignore[method-assign]

    def on_train_start(self, run: Any) -> None:
        """Begin with the settings of the run."""
        self._run = None
        self._reached = run.start_step // self._steps
        self._logger.begin(run.settings, run.start_step)
        self._run = run

    def _log_round(self, record: RoundEnded) -> None:
        reached = record.global_step // self._steps
        if reached > self._reached:
            self._reached = reached
            self._log(record)

    def on_epoch_end(self, metrics: EpochMetrics) -> None:
        """Log the epoch."""
        self._log(metrics)

    def on_evaluation(self, record: EvaluationEnded) -> None:
        """Log the evaluation."""
        self._log(record)

    def on_train_end(self, _state: Any) -> None:
        """Close the logger."""
        run, self._run = self._run, None
        if run is not None:
            self._logger.end(run.status().phase)

    def _log(self, record: EpochMetrics | EvaluationEnded | RoundEnded) -> None:
        if self._run is not None:
            self._logger.log(numbers_of(record), record.global_step)


# ---------------------------------------------------------------- the numbers of a record
def numbers_of(record: EpochMetrics | EvaluationEnded | RoundEnded) -> dict[str, Number]:
    """Numbers of a record by name; fields that are None are left out.

    ::

        epoch, lr                             of an epoch, from 1; the first group's learning rate
        lr_groups/<name>                      of all groups, where there are several
        train/loss, train/<scalar>            means over all ranks
        eval/<name>                           means and metrics of the evaluation
        eval_arrays/<name>[1,0]               elements of a metric with several, up to 100 of them
        run/samples_per_s, run/epoch_ms ...   of all ranks together
        rank0/loss, rank0/busy_ms ...         the part of each rank
        round/loss, round_rank0/steps ...     of a round

    A recorded scalar with the name of a number of flowdp's own is `train/scalars/<name>`.
    """
    match record:
        case RoundEnded():
            return _of_round(record)
        case EvaluationEnded():
            return {"epoch": record.epoch + 1, **_evaluated(record)}
        case EpochMetrics():
            return _of_epoch(record)


def _of_epoch(metrics: EpochMetrics) -> dict[str, Number]:
    numbers: dict[str, Number] = {"epoch": metrics.epoch + 1, "lr": metrics.lr}
    numbers |= {f"lr_groups/{name}": lr for name, lr in metrics.group_lrs.items()}
    if not metrics.is_complete:  # a run that goes on reports this epoch once more
        numbers["is_complete"] = 0
    if metrics.owes_evaluation:  # so does one
        numbers["is_evaluated"] = 0
    numbers |= _scalars("train/", metrics.scalars, OF_TRAINING) | _fields("train/", metrics, OF_TRAINING)
    numbers |= _evaluated(metrics)
    numbers |= {"run/samples_per_s": sum(metrics.throughput)} | _fields("run/", metrics, OF_RUN)
    for rank, part in enumerate(metrics.per_rank):
        prefix = f"rank{rank}/"
        numbers |= _scalars(prefix, part.scalars, (*OF_RANK, "share", "samples_per_s"))
        numbers |= _fields(prefix, part, OF_RANK)
        numbers[f"{prefix}share"], numbers[f"{prefix}samples_per_s"] = (
            metrics.share[rank],
            metrics.throughput[rank],
        )
    return numbers


def _evaluated(record: EpochMetrics | EvaluationEnded) -> dict[str, Number]:
    numbers: dict[str, Number] = {f"eval/{name}": value for name, value in record.eval.items()}
    for name, array in record.eval_arrays.items():
        if len(array.values) <= MOST_ELEMENTS:
            indices = (",".join(map(str, index)) for index in product(*map(range, array.shape)))
            values = zip(indices, array.values, strict=True)
            numbers |= {f"eval_arrays/{name}[{index}]": value for index, value in values}
    return numbers


def _of_round(record: RoundEnded) -> dict[str, Number]:
    numbers: dict[str, Number] = {"round/number": record.round, "round/epoch": record.epoch + 1}
    numbers |= _fields("round/", record, OF_ROUND)
    numbers |= {f"round_lr_groups/{name}": lr for name, lr in record.group_lrs.items()}
    for rank in range(len(record.steps)):
        numbers |= {
            f"round_rank{rank}/steps": record.steps[rank],
            f"round_rank{rank}/samples": record.samples[rank],
            f"round_rank{rank}/busy_ms": record.busy_ms[rank],
            f"round_rank{rank}/data_wait_ms": record.data_ms[rank],
            f"round_rank{rank}/wait_ms": record.wait_ms[rank],
        }
    return numbers


def _fields(prefix: str, record: object, names: Sequence[str]) -> dict[str, Number]:
    """Fields of a record; those that are None are left out."""
    values = {f"{prefix}{name}": getattr(record, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _scalars(prefix: str, scalars: Mapping[str, float], own: Sequence[str]) -> dict[str, Number]:
    """Recorded scalars; one that is called like a number of flowdp's own stands apart."""
    return {f"{prefix}{'scalars/' if name in own else ''}{name}": value for name, value in scalars.items()}
