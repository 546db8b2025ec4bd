"""Tasks of the ranks at a barrier, between two rounds with nothing dealt, and their answers.

The replicas are equal then, and no order can be obeyed in different rounds: one in the inbox is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowdp.policy.metric_array import MetricArray

__all__ = [
    "BarrierTask",
    "CheckpointWritten",
    "CopyReplica",
    "Evaluate",
    "Evaluated",
    "Evaluation",
    "MergeMetrics",
    "MetricsMerged",
    "ReplicaCopied",
    "SaveState",
    "Settle",
    "Settled",
    "StateSaved",
]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """All ranks stand still: evaluate the replicas, which are equal, on the batches of the evaluation.

    Attributes:
        epoch: The epoch that has ended, or that is under way.
        number: Index of the evaluation in the run.
        global_step: Steps of all ranks at which it was due; None: at the end of the epoch.
    """

    epoch: int
    number: int
    global_step: int | None = None


@dataclass(frozen=True, slots=True)
class SaveState:
    """At a barrier: copy this rank's state to the host for a checkpoint.

    Attributes:
        number: Index of the saving in the run.
        model: The rank that also puts down the model.
        is_best: The model is the best so far: a rank of each machine puts it down, for its own user.
    """

    number: int
    model: int = 0
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class CopyReplica:
    """At a barrier: this replica had NaN or inf parameters, and copies another one.

    Attributes:
        donor: The rank to take optimizer state, parameters and buffers from.
        receiver: The rank that copies it from another machine, where its own has no healthy replica: both
            ranks get this order then, and both answer. None: the donor is on the machine of the rank that
            gets the order, and gets none itself.
    """

    donor: int
    receiver: int | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """At a barrier of machines whose means travel while they train: make all replicas equal.

    Nothing was trained since the round of the mean that is on its way, so the replicas become that mean,
    those of a machine that weighed nothing too. Buffers, which do not travel with it, are averaged now.
    """


@dataclass(frozen=True, slots=True)
class MergeMetrics:
    """At a barrier, behind an evaluation by several machines: merge their metrics, and compute the values.

    Attributes:
        number: Index of the evaluation in the run.
    """

    number: int


BarrierTask = Evaluate | MergeMetrics | SaveState | CopyReplica | Settle
"""Task of a rank at a barrier."""

Evaluation = tuple[int, float, tuple[tuple[str, float], ...]]
"""Result of a batch of an evaluation: its number, its samples (or another weight of the means), and (name,
mean) pairs."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A rank has no batch of the evaluation left to take.

    Attributes:
        rank: Rank index.
        results: Results of the batches that it took: number, samples, and (name, mean over the samples)
            pairs.
        arrays: Values of metrics with several elements, by their names, from the last rank.
        has_metrics: This rank is the last one of a machine whose metrics are to be merged with those of
            other machines.
    """

    rank: int
    results: tuple[Evaluation, ...]
    arrays: tuple[tuple[str, MetricArray], ...] = ()
    has_metrics: bool = False


@dataclass(frozen=True, slots=True)
class MetricsMerged:
    """Values of the metrics over the batches of all machines; fields as of `Evaluated`."""

    rank: int
    results: tuple[Evaluation, ...]
    arrays: tuple[tuple[str, MetricArray], ...] = ()


@dataclass(frozen=True, slots=True)
class StateSaved:
    """This rank's state is on its way to the host."""

    rank: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The writer is done with a checkpoint and all before it; those that failed are none the less done.

    Attributes:
        version: Number of the checkpoint.
    """

    version: int


@dataclass(frozen=True, slots=True)
class ReplicaCopied:
    """The replica of this rank equals the others again, or was given to a rank of another machine."""

    rank: int


@dataclass(frozen=True, slots=True)
class Settled:
    """No mean is on its way to this rank, and its replica equals all others."""

    rank: int
