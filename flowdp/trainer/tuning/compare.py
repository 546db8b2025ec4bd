"""Trainers compared by short runs on the same data, seed and first weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowdp.errors import OptionError
from flowdp.policy.formats import Table, format_duration, format_error, format_metric
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import RoundEnded
from flowdp.trainer.config import RunConfig
from flowdp.trainer.trainer import Trainer
from flowdp.trainer.tuning.trial import trial_run
from flowdp.validators import check_int

__all__ = ["ComparedRun", "Comparison", "compare"]

TAIL = 0.1
"""Part of a run's samples, at its end and at its beginning, whose mean is its last and its first loss."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        name: Name of the trainer.
        error: Failure of the run; None where it ended well. All numbers are 0 or None then.
        seconds: Wall time of the epochs, from the first step to the last.
        samples: Samples trained.
        loss: Training loss, over the last tenth of the samples; None where the run records none.
        first_loss: Over the first tenth.
        eval: Means of the last evaluation, empty without one.
        efficiency: Throughput over that of the devices in their steps, as `Run.report()` has it.
    """

    name: str
    error: BaseException | None = None
    seconds: float = 0.0
    samples: int = 0
    loss: float | None = None
    first_loss: float | None = None
    eval: Mapping[str, float] | None = None
    efficiency: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples of all devices per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def loss_per_s(self) -> float | None:
        """Fall of the loss per second, from the first to the last tenth; None without losses."""
        if self.loss is None or self.first_loss is None or not self.seconds:
            return None
        return (self.first_loss - self.loss) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; prints as a table.

    Attributes:
        runs: One for each trainer, in their order.
    """

    runs: tuple[ComparedRun, ...]

    def __getitem__(self, name: str) -> ComparedRun:
        """The run of a name.

        Raises:
            KeyError: There is none.
        """
        return {run.name: run for run in self.runs}[name]

    @property
    def table(self) -> Table:
        """A row for each run."""
        evaluated = list(dict.fromkeys(name for run in self.runs for name in run.eval or {}))
        header = ("run", "loss", *(f"eval {name}" for name in evaluated), "time", "loss/s", "samples/s")
        return Table((*header, "efficiency", ""), [_row(run, evaluated) for run in self.runs])

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def compare(trainers: Mapping[str, Trainer], *, epochs: int = 1) -> Comparison:
    """Run several trainers for a few epochs each, and compare loss, time and efficiency.

    ::

        policies = {policy: flowdp.Trainer(..., policy=policy) for policy in ("cadence", "sync", "exact")}
        comparison = flowdp.compare(policies)
        print(comparison)

    They run one after another, with the seed of the first trainer, and torch's, NumPy's and Python's
    generators stand at each start where they stand now: so factories draw the same first weights. A run that
    fails has its error in its row, and the others go on. Evaluations are held; callbacks, checkpoints,
    `resume` and `max_steps` have no part in it. Models, optimizers and generators stay as they are.

    Args:
        trainers: Trainers by name, on one dataset, or their losses say nothing; they are not changed.
        epochs: Epochs of each run.

    Raises:
        OptionError: There is no trainer, or something else than one.
    """
    check_int("epochs", epochs)
    if not isinstance(trainers, Mapping) or not trainers:
        raise OptionError(
            f"compare takes trainers by name, {{'sync': flowdp.Trainer(...)}}, not {trainers!r}"
        )
    for name, trainer in trainers.items():
        if not isinstance(trainer, Trainer):
            raise OptionError(f"compare takes trainers by name, not {trainer!r} as {name!r}")
    configs = {name: trainer.config for name, trainer in trainers.items()}
    seed = next(iter(configs.values())).replica.seed
    return Comparison(tuple(_compared(name, config, epochs, seed) for name, config in configs.items()))


def _compared(name: str, config: RunConfig, epochs: int, seed: int) -> ComparedRun:
    seeded = replace(config.replica, seed=seed)
    try:
        with trial_run(replace(config, replica=seeded, epochs=epochs, max_steps=None)) as run:
            rounds = list(run.metrics(every="round"))
        return _summed(name, rounds, run.history, run.report().efficiency)
    except Exception as error:  # of a factory, too, which is the user's code
        return ComparedRun(name, error)


def _summed(
    name: str, rounds: Sequence[RoundEnded], history: Sequence[EpochMetrics], efficiency: float
) -> ComparedRun:
    seconds = sum(epoch.epoch_ms for epoch in history) / 1e3
    samples = sum(sum(record.samples) for record in rounds)
    return ComparedRun(
        name,
        seconds=seconds,
        samples=samples,
        loss=_mean(rounds[::-1], TAIL * samples),
        first_loss=_mean(rounds, TAIL * samples),
        eval=history[-1].eval,
        efficiency=efficiency,
    )


def _mean(rounds: Sequence[RoundEnded], least: float) -> float | None:
    """Mean loss of the first rounds that have at least so many samples; None without a loss."""
    total, samples = 0.0, 0
    for record in rounds:
        if record.loss is not None:
            total, samples = total + record.loss * sum(record.samples), samples + sum(record.samples)
        if samples >= least:
            break
    return total / samples if samples else None


def _row(run: ComparedRun, evaluated: Sequence[str]) -> tuple[str, ...]:
    if run.error is not None:
        return (run.name, *("-" for _ in evaluated), *("-",) * 5, format_error(run.error))
    numbers = [run.loss, *((run.eval or {}).get(name) for name in evaluated)]
    return (
        run.name,
        *map(_shown, numbers),
        format_duration(1e3 * run.seconds),
        _shown(run.loss_per_s),
        f"{run.samples_per_s:,.0f}",
        f"{100 * run.efficiency:.0f} %",
        "",
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else format_metric(value)
