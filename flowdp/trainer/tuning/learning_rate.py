"""Learning rate range test: the loss over a rate that grows from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flowdp.device.worker_context import CurrentWorker
from flowdp.errors import FlowdpError, OptionError, StepError
from flowdp.machine.policies import ROUNDS
from flowdp.observe.callbacks import Callback
from flowdp.policy.formats import format_metric
from flowdp.replica.learning_rate import SchedulerOptions
from flowdp.trainer.trainer import Trainer
from flowdp.trainer.tuning.trial import trial_run
from flowdp.validators import check_installed, check_int, check_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LrCurve", "find_lr"]

ENDLESS = 10**9
"""Epochs of a run that its loss ends."""

SPREAD = 1 / 20
"""Standard deviation of the weights that smooth the curve, as a part of the steps."""

SKIPPED = 0.1
"""Part of the steps, at the beginning, that says how high the loss is before it moves."""

LIMIT = 4.0
"""Multiple of that loss from which it has diverged."""

MEMORY = 0.9
"""Weight of the past in the mean that is compared with it."""


@dataclass(frozen=True)
class LrCurve:
    """Result of `find_lr`: loss over learning rate; prints as one line.

    Attributes:
        lrs: Learning rates as an optimizer is given them, before `lr_scaling`. Shape (steps,).
        losses: Mean loss of each step's samples, before the step. Shape (steps,).
        smoothed: Mean of the losses around each, by a bell curve of 1/20 of the steps; one that is higher
            than those of the beginning counts as these. Shape (steps,).
        diverged: The test ended because the loss was four times that of the beginning, or not finite; else it
            came to its last rate.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """Learning rate at which the smoothed loss falls most steeply; None where it falls nowhere."""
        first = math.ceil(SKIPPED * len(self.lrs))
        if len(self.lrs) - first < 2:
            return None
        slopes = np.gradient(self.smoothed[first:])  # over equal steps of log(lr)
        steepest = int(slopes.argmin())
        return self.lrs[first + steepest] if slopes[steepest] < 0 else None

    def __str__(self) -> str:
        end = "the loss diverged" if self.diverged else "the loss did not diverge"
        tried = f"{len(self.lrs)} steps from {self.lrs[0]:.1e} to {self.lrs[-1]:.1e}; {end}"
        if self.suggestion is None:
            return f"no suggestion: the loss fell nowhere | {tried}"
        at = self.smoothed[self.lrs.index(self.suggestion)]
        return f"suggested learning rate {self.suggestion:.1e}, at loss {format_metric(at)} | {tried}"

    def plot(self) -> Figure:
        """Draw loss over learning rate, with the suggestion.

        Raises:
            OptionError: matplotlib is not installed.
        """
        check_installed("a plot", "matplotlib", "plot")
        from matplotlib.figure import Figure  # without pyplot: no window, no state of the process

        figure = Figure(figsize=(7.0, 4.0), layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.plot(self.lrs, self.losses, color="C0", alpha=0.3, label="loss of a step")
        axes.plot(self.lrs, self.smoothed, color="C0", label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"{self.suggestion:.1e}")
        low, high = min(self.losses), max(self.smoothed)
        axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))  # not up to where it diverges
        axes.legend()
        return figure


def find_lr(trainer: Trainer, *, lowest: float = 1e-7, highest: float = 10.0, steps: int = 100) -> LrCurve:
    """Run a learning rate range test: train with a rate that grows exponentially, and look at the loss.

    ::

        curve = flowdp.find_lr(trainer)
        print(curve.suggestion)
        curve.plot().savefig("lr.png")

    It trains on the trainer's devices with its loss, sizes, precision and clipping, "exact" where that is the
    policy, else one step of each device and a mean. The test ends when the loss has diverged. Model,
    optimizer and random generators stay as they are; the rest of a run's options has no part in it. Of
    several parameter groups and optimizers the first has these rates, and the others keep their ratio to it.

    Args:
        trainer: Trainer of the run for which the rate is sought; it is not changed.
        lowest: Learning rate of the first step.
        highest: Learning rate of the last one.
        steps: Steps of each device.

    Raises:
        OptionError: A number is out of its range, `train_step` returns no loss, or the run cannot start.
        FlowdpError: The run failed.

    Source:
        Smith 2017, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186, section 3.3.
    """
    check_number("lowest", lowest, above=True)
    check_number("highest", highest, above=True)
    check_int("steps", steps, least=10)
    if lowest >= highest:
        raise OptionError(f"lowest={lowest!r} must be less than highest={highest!r}")
    config = trainer.config
    trained = config.replica
    is_exact = ROUNDS[trained.policy].averages == "gradients"
    sweep = _Sweep(lowest, highest, steps, together=1 if is_exact else config.world_size)
    probe = _Probe(sweep, config.world_size)
    replica = replace(
        trained,
        policy="exact" if is_exact else "sync",
        scheduler=SchedulerOptions(sweep.schedule, unit="step", lr_scaling=trained.scheduler.lr_scaling),
        capture=None,
        checks_loss=False,
    )
    test = replace(
        config,
        replica=replica,
        epochs=ENDLESS,
        max_steps=None,
        outer=None,  # a mean after each step
        ratios=config.ratios if is_exact else None,
        evaluation=None,
        failures=replace(config.failures, on_failure="raise"),
    )
    try:
        with trial_run(test, (probe,)) as run:
            run.join()
    except StepError as error:
        if isinstance(error.__cause__, OptionError):
            raise error.__cause__ from None
        if not isinstance(error.__cause__, _TestEnded):
            raise
    curve = probe.curve()
    if not curve.lrs:
        raise FlowdpError(
            "find_lr: the first loss is not finite: look at the batch, the loss and the weights"
        )
    return curve


class _TestEnded(Exception):
    """Raised in the step where the test is over."""


@dataclass(frozen=True)
class _Sweep:
    """Rate of each step.

    Attributes:
        together: Steps of all ranks that have one position, and so one rate.
    """

    lowest: float
    highest: float
    steps: int
    together: int
    _base: list[float] = field(default_factory=list)

    def lr(self, index: int) -> float:
        """Learning rate of a step; beyond the last one, that one's."""
        part = min(1.0, index / (self.steps - 1))
        return float(self.lowest * (self.highest / self.lowest) ** part)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """A scheduler, in steps of all ranks; the first optimizer says what 1 is for all of them."""
        self._base.append(float(optimizer.param_groups[0]["lr"]))
        if not self._base[0]:
            raise OptionError(
                "find_lr multiplies the optimizer's learning rate, and lr=0 stays 0: give another"
            )
        return LambdaLR(optimizer, lambda position: self.lr(position // self.together) / self._base[0])


@dataclass
class _Losses:
    """Losses of one rank, and whether they diverge.

    Attributes:
        settles: Index of the first step whose loss is judged.
        seen: (index of the step, loss, samples) of each.
        diverged: They do.
    """

    settles: int
    seen: list[tuple[int, float, int]] = field(default_factory=list)
    diverged: bool = False
    _mean: float = 0.0
    _weight: float = 0.0
    _limit: float = math.inf

    def add(self, index: int, loss: float, samples: int) -> None:
        """Note a loss.

        Raises:
            _TestEnded: It has diverged.
        """
        if math.isfinite(loss):
            self.seen.append((index, loss, samples))
            self._weight = MEMORY * self._weight + (1 - MEMORY)
            self._mean += (1 - MEMORY) / self._weight * (loss - self._mean)
            if index < self.settles:
                self._limit = self._mean + (LIMIT - 1) * abs(self._mean)
        self.diverged = not math.isfinite(loss) or (index >= self.settles and self._mean > self._limit)
        if self.diverged:
            raise _TestEnded


class _Probe(Callback):
    """Looks at the loss of each step.

    Args:
        sweep: Rate of each step.
        ranks: Ranks of the run.

    Threads:
        The workers; each writes to the losses of its rank.
    """

    def __init__(self, sweep: _Sweep, ranks: int) -> None:
        self._sweep = sweep
        self._ranks = [_Losses(math.ceil(SKIPPED * sweep.steps)) for _ in range(ranks)]

    def on_step(self, worker: CurrentWorker, loss: Tensor | None) -> None:
        """Note the loss of a step."""
        index = worker.global_step // self._sweep.together
        if index >= self._sweep.steps:
            raise _TestEnded
        if loss is not None:
            self._ranks[worker.rank].add(index, float(loss), worker.samples)
        elif worker.samples:
            raise OptionError(
                'find_lr needs the loss of each step: let train_step return {"loss": loss, ...}'
            )

    def curve(self) -> LrCurve:
        """The losses of all ranks together."""
        sums: dict[int, tuple[float, float]] = {}
        for index, loss, samples in (step for rank in self._ranks for step in rank.seen):
            total, weight = sums.get(index, (0.0, 0.0))
            sums[index] = total + samples * loss, weight + samples
        losses = [total / weight for _, (total, weight) in sorted(sums.items())]
        return LrCurve(
            lrs=tuple(self._sweep.lr(index) for index in sorted(sums)),
            losses=tuple(losses),
            smoothed=_smoothed(losses, self._sweep.steps),
            diverged=any(rank.diverged for rank in self._ranks),
        )


def _smoothed(losses: Sequence[float], steps: int) -> tuple[float, ...]:
    """Means of each loss and those on both sides of it: later ones, too, so that the curve does not lag.

    The losses of the divergence, cut to the level from which the curve came, do not hide the descent.
    """
    if not losses:
        return ()
    level = np.mean(losses[: math.ceil(SKIPPED * steps)])
    at = np.arange(len(losses))
    weights = np.exp(-(((at[:, None] - at) / (SPREAD * steps)) ** 2) / 2)
    means = weights @ np.minimum(losses, level) / weights.sum(1)
    return tuple(float(mean) for mean in means)
