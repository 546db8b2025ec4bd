"""The mean of snapshots, taken while the ranks train on.

Each rank puts a copy of its replica down, a helper averages the copies, and each rank adds the difference
between the mean and its own copy: the steps it took meanwhile are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from flowdp.collective.base import BlockMean, arithmetic, relative_drift, shift
from flowdp.device.tensors import FlatReplica
from flowdp.errors import ProtocolError

__all__ = ["Snapshots"]


class Snapshots:
    """A slot per rank and their mean, all tagged with the round they belong to.

    A slot that does not belong to the round is never averaged or applied. Memory: one replica per rank and
    one for the mean (bfloat16 and float16 parameters in float32), made at the first use and kept.

    Args:
        replicas: One per rank.

    Raises:
        OptionError: The replicas differ in structure.

    Threads: ranks take and apply at the same time, the helper averages between. That `take` of the next
        round comes after every `apply` of this one, if there is one, is the coordinator's promise.
    """

    def __init__(self, replicas: Sequence[FlatReplica]) -> None:
        for replica in replicas:
            replica.check_like(replicas[0])
        self._replicas = tuple(replicas)
        self._slots: list[list[Tensor]] = [[] for _ in replicas]
        self._taken: list[int | None] = [None] * len(replicas)
        self._mean: list[Tensor] = []
        self._averaged: int | None = None

    def take(self, rank: int, round: int) -> None:
        """Copy the replica into this rank's slot.

        Raises:
            CollectiveError: The module lost a tensor or changed its shape.

        Threads: worker `rank`.
        """
        replica = self._replicas[rank]
        replica.gather()
        self._taken[rank] = None
        if not self._slots[rank]:
            self._slots[rank] = [torch.empty_like(memory) for memory in replica.memories]
        for slot, memory in zip(self._slots[rank], replica.memories, strict=True):
            slot.copy_(memory)
        self._taken[rank] = round

    def average(self, round: int, samples: Sequence[int]) -> tuple[float, tuple[float, ...]]:
        """Average the snapshots of a round.

        Args:
            round: Which.
            samples: Weight per rank. Shape (world_size,). A rank with 0 need not have a snapshot.

        Returns:
            Time it took, in milliseconds, and the drift ||snapshot - mean|| / ||mean|| per rank, 0.0 for
            one without a snapshot.

        Raises:
            ProtocolError: A rank with samples has no snapshot of this round, or no rank has samples.

        Threads: the helper; no rank takes or applies meanwhile.
        """
        start = perf_counter()
        for rank, count in enumerate(samples):
            if count and self._taken[rank] != round:
                raise ProtocolError(
                    f"the snapshot of rank {rank} is of round {self._taken[rank]}, not of round {round}"
                )
        members = [rank for rank, taken in enumerate(self._taken) if taken == round]
        flats = self._replicas[0].flats
        if not self._mean:
            self._mean = [
                torch.empty_like(
                    flat.memory, dtype=flat.memory.dtype if flat.counts else arithmetic(flat.memory.dtype)
                )
                for flat in flats
            ]
        self._averaged = None
        mean = BlockMean(flats, [self._slots[member] for member in members], [self._mean])
        *squares, mean_square = mean.reduce([samples[member] for member in members], drift=True)
        drifts = [0.0] * len(samples)
        for member, square in zip(members, squares, strict=True):
            drifts[member] = relative_drift(square, mean_square)
        self._averaged = round
        return (perf_counter() - start) * 1e3, tuple(drifts)

    def apply(self, rank: int, round: int) -> None:
        """Bring the mean into the replica, once.

        Parameters move by `mean - snapshot`, so no local step is lost. Float buffers are replaced: a
        difference can make a variance negative. Integers and flags take the maximum.

        Raises:
            ProtocolError: The mean or the snapshot is of another round.
            CollectiveError: The module lost a tensor or changed its shape.

        Threads: worker `rank`; others may apply at the same time.
        """
        if not round == self._averaged == self._taken[rank]:
            raise ProtocolError(
                f"rank {rank} was told to apply round {round}; its snapshot is of round {self._taken[rank]}, "
                f"the mean of round {self._averaged}"
            )
        replica = self._replicas[rank]
        replica.gather()
        for flat, mean, slot in zip(replica.flats, self._mean, self._slots[rank], strict=True):
            if flat.counts:
                torch.maximum(flat.memory, mean, out=flat.memory)
            else:
                shift(flat, mean, slot)
                flat.memory[flat.split :].copy_(mean[flat.split :])
        replica.scatter()
        self._taken[rank] = None
