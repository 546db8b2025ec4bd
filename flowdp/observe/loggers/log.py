"""The callback that gives a run's numbers to a logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from flowdp.errors import OptionError
from flowdp.observe.callbacks import Callback
from flowdp.observe.loggers.numbers import Number, numbers_of
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded
from flowdp.validators import is_int

__all__ = ["Every", "Log", "RunLogger", "Setting"]

Every = Literal["epoch", "round"] | int
Setting = str | int | float | bool | None


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
