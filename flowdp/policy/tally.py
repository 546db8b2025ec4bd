"""Sums of the work of the ranks in an epoch.

`Work` is the report of a rank for an order, `Tally` adds up, `EpochMetrics` is the user's record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowdp.policy.drift import largest_drift
from flowdp.policy.formats import format_duration, format_metric

__all__ = [
    "NO_NORMS",
    "EpochMetrics",
    "MetricArray",
    "RankMetrics",
    "Tally",
    "Work",
    "evaluation_means",
    "pace_ms",
]


@dataclass(frozen=True, slots=True, repr=False)
class MetricArray:
    """Value of a metric that has several elements: a confusion matrix, one number per class.

    ::

        confusion = torch.tensor(metrics.eval_arrays["confusion"].tolist())

    Attributes:
        shape: Sizes of its dimensions.
        values: All elements, those of the last dimension beside each other. Shape (product of `shape`,).
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]

    def tolist(self) -> list[Any]:
        """The elements as nested lists, as `torch.tensor` and `numpy.array` take them."""
        if not self.values:
            return []
        nested: list[Any] = list(self.values)
        for size in reversed(self.shape[1:]):
            nested = [nested[at : at + size] for at in range(0, len(nested), size)]
        return nested

    def __repr__(self) -> str:
        return f"<MetricArray {' x '.join(map(str, self.shape))}>"


NO_NORMS = (0.0, 0.0, 0)
"""No gradients were clipped."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a rank for one order, or for several together: a sum has what all of them have done.

    Attributes:
        epoch: Epoch of the batches.
        steps: Optimizer steps.
        samples: Samples trained.
        busy_ms: Time in steps.
        data_ms: Time spent waiting for batches.
        pace_ms: Time of one step including its wait for data; 0 where nothing was measured.
        losses: Sum of loss x samples, and the samples it was summed over; weights that the losses name, in
            place of samples.
        scalars: Name -> (weighted sum, sum of weights), from `record_scalar`.
        lr: Learning rate of the first group at the last step.
        bad: (epoch, batch) of the first step with NaN or inf values; None without one.
        norms: Sum, largest and number of the 2-norms of its steps' gradients, where they were clipped.
        group_lrs: Learning rates of all groups at the last step, by name; empty where there is one group.
        wait_ms: Time in the gate waiting for other ranks.
        sync_ms: Time in averaging.
    """

    epoch: int
    steps: int
    samples: int
    busy_ms: float = 0.0
    data_ms: float = 0.0
    pace_ms: float = 0.0
    losses: tuple[float, float] = (0.0, 0)
    scalars: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lr: float = 0.0
    bad: tuple[int, int] | None = None
    norms: tuple[float, float, int] = NO_NORMS
    group_lrs: Mapping[str, float] = field(default_factory=dict)
    wait_ms: float = 0.0
    sync_ms: float = 0.0

    def __add__(self, later: Work) -> Work:
        """Both together; see `total`."""
        return Work.total((self, later))

    @classmethod
    def total(cls, works: Sequence[Work]) -> Work:
        """All of them together, without what belongs to one order: its pace and its first bad step.

        Args:
            works: Earlier ones first; at least one.
        """
        last, scalars = works[0], dict[str, tuple[float, float]]()
        steps = samples = norms = 0
        busy_ms = data_ms = wait_ms = sync_ms = loss = weight = norm = largest = 0.0
        for work in works:
            if work.steps:
                last = work
            steps += work.steps
            samples += work.samples
            busy_ms += work.busy_ms
            data_ms += work.data_ms
            wait_ms += work.wait_ms
            sync_ms += work.sync_ms
            loss, weight = loss + work.losses[0], weight + work.losses[1]
            if work.norms is not NO_NORMS:
                total, most, count = work.norms
                norm, largest, norms = norm + total, max(largest, most), norms + count
            for name, (amount, share) in work.scalars.items():
                known = scalars.get(name, (0.0, 0.0))
                scalars[name] = known[0] + amount, known[1] + share
        return cls(
            works[0].epoch,
            steps,
            samples,
            busy_ms,
            data_ms,
            losses=(loss, weight),
            scalars=scalars,
            lr=last.lr,
            norms=(norm, largest, norms) if norms else NO_NORMS,
            group_lrs=last.group_lrs,
            wait_ms=wait_ms,
            sync_ms=sync_ms,
        )

    @property
    def loss(self) -> float | None:
        """Mean loss; None without any."""
        total, samples = self.losses
        return total / samples if samples else None

    @property
    def means(self) -> dict[str, float]:
        """Weighted means of the scalars; NaN for one without weight."""
        return {
            name: total / weight if weight else math.nan for name, (total, weight) in self.scalars.items()
        }

    @property
    def grad_norm(self) -> float | None:
        """Mean norm of the gradients; None where none were clipped."""
        total, _, count = self.norms
        return total / count if count else None

    @property
    def grad_norm_max(self) -> float | None:
        """Largest norm of the gradients; None where none were clipped."""
        return self.norms[1] if self.norms[2] else None


def pace_ms(total_ms: float, longest_ms: float, steps: int) -> float:
    """Time of one step, the longest left out; 0 without steps.

    The first step of a run allocates memory for all later ones, and a step that stalled says nothing about
    the next ones: counted, one of them would stretch the rounds of all ranks.

    Args:
        total_ms: Time of all steps, with their waits for data.
        longest_ms: Time of the longest of them.
        steps: How many.
    """
    if steps < 2:
        return total_ms
    return (total_ms - longest_ms) / (steps - 1)


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """One rank's part of an epoch.

    Attributes:
        samples: Samples trained.
        steps: Optimizer steps.
        busy_ms: Time in steps.
        data_wait_ms: Time waiting for batches.
        wait_ms: Time waiting for other ranks.
        sync_ms: Time in averaging.
        loss: Mean over its samples, or by the weights that its losses name; None without any.
        scalars: Weighted means of its recorded scalars.
        lr: Learning rate of the first group at its last step; 0 if it took none.
    """

    samples: int
    steps: int
    busy_ms: float
    data_wait_ms: float
    wait_ms: float
    sync_ms: float
    loss: float | None
    scalars: Mapping[str, float]
    lr: float


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """The record of one epoch; prints as one line.

    Attributes:
        epoch: Epoch index, from 0.
        epochs: Epochs of the run, or None where it ends by steps.
        loss: Mean over the samples of all ranks, or by the weights that the losses name; None without
            any.
        scalars: Means of the recorded scalars, by their weights, over all ranks.
        per_rank: The parts of the ranks. Shape (world_size,).
        epoch_ms: Wall time of the epoch.
        throughput: Samples per second of the epoch's wall time, waiting included; they sum to the
            throughput of the run. Shape (world_size,).
        share: Fraction of the samples. Shape (world_size,).
        lr: Learning rate of the first group at the last step of the lowest rank that took one.
        rounds: Averagings.
        sync_ms: Time of all averagings together, without waiting.
        anchor: Steps of the slowest rank in a round, at the end.
        divergence: Largest drift, NaN where one was NaN; None where it was not measured.
        efficiency: Fraction of the devices' time that was spent in steps, at most 1.
        global_step: Steps of all ranks in the run so far.
        eval: Means and metrics of the evaluation, empty without one.
        eval_arrays: Metrics of the evaluation with several elements, such as a confusion matrix.
        grad_norm: Mean over the steps of the 2-norm of the gradients before they were clipped; None without
            `max_grad_norm`.
        grad_norm_max: The largest of them.
        is_complete: False where `max_steps` ended the run inside this epoch: the record is of a part of it.
        group_lrs: Learning rates of all groups of all optimizers, at the same step as `lr`, by name: of what
            tells them apart, key or index of the optimizer and "name" or index of the group, such as
            "critic/1". Empty where there is one group.
        owes_evaluation: A stop came before the end of its evaluation. A run that resumes there makes it up,
            and reports the epoch once more.
    """

    epoch: int
    epochs: int | None
    loss: float | None
    scalars: Mapping[str, float]
    per_rank: tuple[RankMetrics, ...]
    epoch_ms: float
    throughput: tuple[float, ...]
    share: tuple[float, ...]
    lr: float
    rounds: int
    sync_ms: float
    anchor: int
    divergence: float | None
    efficiency: float
    global_step: int
    eval: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    grad_norm_max: float | None = None
    is_complete: bool = True
    eval_arrays: Mapping[str, MetricArray] = field(default_factory=dict)
    group_lrs: Mapping[str, float] = field(default_factory=dict)
    owes_evaluation: bool = False

    @property
    def is_evaluated(self) -> bool:
        """Whether an evaluation belongs to it, and came to its end."""
        return bool(self.eval or self.eval_arrays)

    def __str__(self) -> str:
        number = f"epoch {self.epoch + 1}"
        if self.epochs is not None:
            number = f"{number}/{self.epochs}".ljust(len(f"epoch {self.epochs}/{self.epochs}"))
        if not self.is_complete:
            number = f"{number.rstrip()}, a part"
        if self.owes_evaluation:
            number = f"{number.rstrip()}, not evaluated"
        metrics = {} if self.loss is None else {"loss": self.loss}
        metrics |= {**self.scalars, **{f"eval {name}": value for name, value in self.eval.items()}}
        return " | ".join(
            [
                number,
                *(f"{name} {format_metric(value)}" for name, value in metrics.items()),
                f"{sum(self.throughput):>6,.0f} samples/s",
                "share "
                + " ".join(
                    f"{100.0 * share:2.0f} %" + " (left out)" * (share < 0.005) for share in self.share
                ),
                format_duration(self.epoch_ms),
            ]
        )


class Tally:
    """Adds up the work of one epoch.

    Args:
        epoch: Epoch index, from 0.
        world_size: Ranks.

    Attributes:
        ranks: Work of each rank so far. Shape (world_size,).
        rounds: Averagings.
        sync_ms: Time of all of them, without waiting.
        divergence: Largest drift, NaN where one was NaN; None where not measured.

    Threads: no locks; one owner.
    """

    def __init__(self, epoch: int, world_size: int) -> None:
        self._epoch = epoch
        self.ranks = [Work(epoch, 0, 0) for _ in range(world_size)]
        self.rounds = 0
        self.sync_ms = 0.0
        self.divergence: float | None = None

    def add(self, rank: int, work: Work) -> None:
        """Count the work of a rank: for an order, or in the run that this one continues."""
        self.ranks[rank] += work

    def close_round(self, sync_ms: float, drift: float | None, rounds: int = 1) -> None:
        """Count averagings.

        Args:
            sync_ms: Time of all of them together, without waiting.
            drift: Largest over the ranks; None where not measured.
            rounds: How many.
        """
        self.rounds += rounds
        self.sync_ms += sync_ms
        if drift is not None:
            known = () if self.divergence is None else (self.divergence,)
            self.divergence = largest_drift((*known, drift))

    def result(
        self,
        epoch_ms: float,
        anchor: int,
        global_step: int,
        epochs: int | None,
        *,
        is_complete: bool = True,
    ) -> EpochMetrics:
        """The record of the epoch.

        Args:
            epoch_ms: Wall time of the epoch.
            anchor: Steps of the slowest rank in a round, now.
            global_step: Steps of all ranks in the run so far.
            epochs: Epochs of the run, or None.
            is_complete: Whether it is all of the epoch.
        """
        whole = Work.total(self.ranks)
        first = next((work for work in self.ranks if work.steps), whole)  # which has no rate either
        available_ms = len(self.ranks) * epoch_ms
        return EpochMetrics(
            epoch=self._epoch,
            epochs=epochs,
            loss=whole.loss,
            scalars=whole.means,
            per_rank=tuple(map(_rank_metrics, self.ranks)),
            epoch_ms=epoch_ms,
            throughput=tuple(1e3 * work.samples / epoch_ms if epoch_ms > 0.0 else 0.0 for work in self.ranks),
            share=tuple(work.samples / max(1, whole.samples) for work in self.ranks),
            lr=first.lr,
            rounds=self.rounds,
            sync_ms=self.sync_ms,
            anchor=anchor,
            divergence=self.divergence,
            efficiency=min(1.0, whole.busy_ms / available_ms) if available_ms > 0.0 else 0.0,
            global_step=global_step,
            grad_norm=whole.grad_norm,
            grad_norm_max=whole.grad_norm_max,
            is_complete=is_complete,
            group_lrs=first.group_lrs,
        )


def _rank_metrics(work: Work) -> RankMetrics:
    return RankMetrics(
        samples=work.samples,
        steps=work.steps,
        busy_ms=work.busy_ms,
        data_wait_ms=work.data_ms,
        wait_ms=work.wait_ms,
        sync_ms=work.sync_ms,
        loss=work.loss,
        scalars=work.means,
        lr=work.lr,
    )


def evaluation_means(
    results: Sequence[tuple[int, float, tuple[tuple[str, float], ...]]],
) -> dict[str, float]:
    """Means over an evaluation, independent of which rank evaluated which batch.

    Args:
        results: Results of its batches: number, samples or another weight, and (name, mean) pairs. A name
            that some batches lack is the mean over the others.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for _, weight, values in sorted(results, key=lambda result: result[0]):
        for name, value in values:
            # A mean over nothing is NaN, as a rule, and would stay so times 0.
            parts.setdefault(name, []).append((value * weight if weight else 0.0, weight))
    means = {}
    for name, terms in sorted(parts.items()):
        weight = _sum([weight for _, weight in terms])
        means[name] = _sum([term for term, _ in terms]) / weight if weight else math.nan
    return means


def _sum(terms: Sequence[float]) -> float:
    """The sum, rounded once, so that the order is of no account."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # finite terms beyond the floats, infinities of both signs
        return sum(terms)
