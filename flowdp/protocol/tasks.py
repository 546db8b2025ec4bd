"""What is said while all ranks stand still, between two rounds with nothing dealt.

The replicas are equal then, and no order can be obeyed in different rounds: one in the inbox is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BarrierTask",
    "CopyReplica",
    "Evaluate",
    "Evaluated",
    "Evaluation",
    "ReplicaCopied",
    "SaveState",
    "StateSaved",
]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """All ranks stand still: evaluate the replicas, which are equal, on the batches of the evaluation.

    Attributes:
        epoch: The epoch that has ended.
        number: Which evaluation of the run, from 0.
    """

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """All ranks stand still: copy to the host what a checkpoint keeps of this rank.

    Attributes:
        number: Which capture of the run, from 0.
        model: The rank that also puts down the model.
    """

    number: int
    model: int = 0


@dataclass(frozen=True, slots=True)
class CopyReplica:
    """All ranks stand still: this replica had NaN or inf parameters, and becomes what another one is.

    Attributes:
        donor: The rank to take optimizer state, parameters and buffers from.
    """

    donor: int


BarrierTask = Evaluate | SaveState | CopyReplica
"""What a rank does while all stand still."""

Evaluation = tuple[int, float, tuple[tuple[str, float], ...]]
"""Of a batch of an evaluation: its number, its samples (or what else the means count for), and (name, mean)
pairs."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A rank has no batch of the evaluation left to take.

    Attributes:
        rank: Who.
        results: Of the batches that it took: number, samples, and (name, mean over the samples) pairs.
    """

    rank: int
    results: tuple[Evaluation, ...]


@dataclass(frozen=True, slots=True)
class StateSaved:
    """What a checkpoint keeps of this rank is on its way to the host."""

    rank: int


@dataclass(frozen=True, slots=True)
class ReplicaCopied:
    """The replica of this rank is again what the others are."""

    rank: int
