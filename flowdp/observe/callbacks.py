"""Callbacks: the user's code beside a run, called with the run's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from flowdp.device.worker_context import CurrentWorker
from flowdp.errors import OptionError
from flowdp.policy.monitor import Monitor
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded
from flowdp.validators import check_flag, check_function, is_number

__all__ = [
    "EMA",
    "METHODS",
    "Callback",
    "EarlyStopping",
    "OnCheckpoint",
    "check_callbacks",
    "ema_decay_of",
    "monitor_of",
    "overrides",
    "step_callbacks",
]

METHODS = (
    "on_train_start",
    "on_epoch_start",
    "on_round",
    "on_evaluation",
    "on_epoch_end",
    "on_checkpoint",
    "on_exception",
    "on_train_end",
)
"""Methods that a callback may override, and that the observer calls: all but `on_step`."""


class Callback:
    """Base class of callbacks; override the methods you need, the others cost nothing.

    ::

        class Keep(flowdp.Callback):
            def on_train_start(self, run):
                self.run = run

            def on_epoch_end(self, metrics):
                torch.save(self.run.snapshot().state_dict, "weights.pt")
                if metrics.loss < 0.1:
                    self.run.stop()

        flowdp.Trainer(..., callbacks=[Keep()])

    All methods but `on_step` are called on one thread of the run's own, one after another, in the order in
    which callbacks are listed; training goes on meanwhile. One that is slow sees everything later, but of the
    rounds that wait the last 4,096, and of the checkpoints the last 4.

    An exception of a method is logged the first time, stands in `run.status()`, and changes nothing for the
    other callbacks. It ends the run only where the class says `ends_run = True`.

    Threads:
        The observer's. There the run's `join()`, `metrics()` and `paused()` raise. `snapshot()` gives the
        averaged weights: those of the end of the round under way, for training goes on meanwhile. `stop()`,
        `pause()`, `set_lr()`, `scale_lr()`, `set_scheduler()`, `checkpoint()` and `status()` do not wait.

    Attributes:
        ends_run: An exception of a method ends the run: `join()` raises a FlowdpError with it as its cause.
        skips_dev_run: It writes something that stays, as a logger does, so `fast_dev_run` leaves it out.
    """

    ends_run: ClassVar[bool] = False
    skips_dev_run: ClassVar[bool] = False

    def on_step(self, worker: CurrentWorker, loss: Tensor | None) -> None:
        """A device has taken a step. Called in the step, on the worker's own thread; see docs/callbacks.md.

        Under "exact" all devices take every step, and all are called after it, also one without a part of
        the window: what is written to the model is then equal on all.

        All devices call it at once, one thread each, holding the interpreter lock from the others' steps, so
        it must be short, and must not wait: `loss.item()` waits for the device. An exception is an error of
        the step, as one of the loss is, and ends the run.

        Args:
            worker: Rank, device, model, epoch and learning rate, as in the loss; `samples` of the step, 0
                without a part of it, and `local_step` with it. `worker.record(name, value)` counts a number
                towards the epoch's mean.
            loss: Loss of the step, detached, on the device; under "exact" that of this device's part. Shape
                []. Clone it to keep it. None without a part, and where a `train_step` returns none.

        Threads:
            Worker `rank`; the method may be called by several at the same time.
        """

    def on_train_start(self, run: Any) -> None:
        """The run has begun; training may be some steps further.

        Args:
            run: The `flowdp.Run`.
        """

    def on_epoch_start(self, epoch: int) -> None:
        """The first batches of an epoch are about to be dealt; once for each, before its first step.

        Rounds are dealt ahead, so the last steps of the epoch before may still be on their way, and its
        `on_epoch_end` comes later. A run that resumes in the middle of an epoch begins with it.

        Args:
            epoch: Index of the epoch, from 0.
        """

    def on_round(self, record: RoundEnded) -> None:
        """A round has ended; called very often."""

    def on_evaluation(self, record: EvaluationEnded) -> None:
        """An evaluation by steps has ended (`EvaluationOptions(unit="step")`)."""

    def on_epoch_end(self, metrics: EpochMetrics) -> None:
        """An epoch is complete, and evaluated where it was to be.

        Args:
            metrics: Its record. Where a stop came before the end of its evaluation, that has
                `owes_evaluation`, and a run that resumes there reports the epoch once more.
        """

    def on_checkpoint(self, checkpoint: Any) -> None:
        """A checkpoint has been taken.

        Args:
            checkpoint: The `flowdp.Checkpoint`.
        """

    def on_exception(self, error: BaseException) -> None:
        """The run has failed; `on_train_end(None)` comes next.

        Args:
            error: The first failure, which `join()` raises.
        """

    def on_train_end(self, state: Any) -> None:
        """The run is over; the last call.

        Args:
            state: The `flowdp.TrainedState`; None after a failure.
        """


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End the run when an epoch's number has not become better for a while.

    ::

        callbacks=[flowdp.EarlyStopping("accuracy", patience=5, mode="max")]

    The run stops at the end of the epoch that says so, on all devices in the same round. Where the Trainer
    has an evaluation, only the epochs that were evaluated count. A value that is NaN or infinite is never
    better.

    Attributes:
        monitor: Name of a mean of the evaluation, else "loss" or a scalar of the training.
        patience: Epochs in a row without a better value after which the run stops; None: none, for
            `restore_best` alone.
        mode: Whether the least or the greatest is best.
        min_delta: By how much a value must be better than the best one to count.
        restore_best: The run's answer is its best checkpoint, not its end.
    """

    monitor: str = "loss"
    patience: int | None = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    restore_best: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            OptionError: One is out of its range.
        """
        self.watched()
        check_flag("restore_best", self.restore_best)

    def watched(self) -> Monitor:
        """The watched metric, in the coordinator's form."""
        return Monitor(self.monitor, self.mode, self.patience, self.min_delta)


@dataclass(frozen=True)
class EMA(Callback):
    """Exponential moving average of the trained parameters, updated after each step of each device.

    ::

        state = flowdp.Trainer(..., callbacks=[flowdp.EMA(0.999)]).fit()
        state.load_ema_into(model)

    On one device it is torch's `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`. Devices
    average it with their parameters, so all have the same one after each mean. Evaluations are of the
    averaged weights, with the buffers of the model itself (BatchNorm's statistics); checkpoints hold both, a
    resumed run goes on with it, and `TrainedState.ema` has it at the end. The module of the Trainer gets the
    trained weights, not the average.

    Attributes:
        decay: Part of the average that stays in a step, above 0 and below 1.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        """Check the decay.

        Raises:
            OptionError: It is out of its range.
        """
        if not is_number(self.decay) or not 0 < self.decay < 1:
            raise OptionError(f"EMA: decay must be a number above 0 and below 1, not {self.decay!r}")


class OnCheckpoint(Callback):
    """Callback that calls a function with every checkpoint.

    ::

        flowdp.Trainer(..., callbacks=[flowdp.OnCheckpoint(lambda checkpoint: upload(checkpoint.path))])

    Args:
        function: Function to call with the `flowdp.Checkpoint`.

    Raises:
        OptionError: It cannot be called.
    """

    def __init__(self, function: Callable[[Any], object]) -> None:
        check_function("OnCheckpoint's function", function, "the checkpoint", 1)
        self._function = function

    def on_checkpoint(self, checkpoint: Any) -> None:
        """Call the function."""
        self._function(checkpoint)


StepCallback = Callable[[CurrentWorker, Tensor | None], None]


def step_callbacks(callbacks: Iterable[Callback]) -> tuple[StepCallback, ...]:
    """The `on_step` of those that have one of their own, in their order."""
    return tuple(callback.on_step for callback in callbacks if overrides(callback, "on_step"))


def overrides(callback: Callback, method: str) -> bool:
    """Whether a callback has a method of its own."""
    bound = getattr(callback, method)
    return getattr(bound, "__func__", bound) is not getattr(Callback, method)


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """The callbacks of a run, in their order.

    Raises:
        OptionError: Something among them is none, or two of them say the same thing of a run.
    """
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise OptionError(f"callbacks must be a sequence of callbacks, [...], not {callbacks!r}")
    checked = tuple(callbacks)
    for callback in checked:
        if not isinstance(callback, Callback):
            raise OptionError(f"callbacks must be instances of flowdp.Callback, not {callback!r}")
    for kind in (EMA, EarlyStopping):
        if sum(isinstance(callback, kind) for callback in checked) > 1:
            raise OptionError(f"callbacks: a run has one {kind.__name__}, and there are several")
    return checked


def ema_decay_of(callbacks: Iterable[Callback]) -> float | None:
    """Decay of the moving average of the weights; None: there is none."""
    return next((callback.decay for callback in callbacks if isinstance(callback, EMA)), None)


def monitor_of(callbacks: Iterable[Callback]) -> tuple[Monitor | None, bool]:
    """Metric of early stopping, if any, and whether the result is the best checkpoint."""
    stopping = next((callback for callback in callbacks if isinstance(callback, EarlyStopping)), None)
    return (None, False) if stopping is None else (stopping.watched(), stopping.restore_best)
