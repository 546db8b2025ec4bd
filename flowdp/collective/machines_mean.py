"""The mean of the replicas of several machines, in the memory of their hosts.

Each machine reduces its own replicas, and the results are summed by `torch.distributed`, each times the part
of its machine in all samples. The last arrival does all of it while the others stand in the gate.

With overlap the sum of round k travels while the machines train round k + 1. With `sent`, what a machine gave
away in round k, and `mean_k`, which has come when round k + 1 ends::

    parameters = parameters + (mean_k - sent)

So nothing of round k + 1 is lost, and the machines stay one round apart from each other. Buffers do not
travel then: each machine has its own until `settle`, which makes all replicas equal.

Source: the delayed averaging of DaSGD (Zhou et al. 2020, arXiv:2006.00441) and of streaming DiLoCo (Douillard
et al. 2025, arXiv:2501.18512).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from flowdp.collective.mean import BlockMean, Site, arithmetic, copy_all, relative_drift, shift
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import Flat
from flowdp.network.machines import Reduction
from flowdp.network.team import Team
from flowdp.options import Payload
from flowdp.protocol.messages import Outcome

__all__ = ["PACKS", "MachinesMean", "Pack"]

SUMMED = {torch.uint8, torch.int8, torch.int32, torch.int64}
"""Integer dtypes that gloo reduces; others travel as int64."""

Pack = Callable[[Tensor], Tensor]
"""The seam for a compression: makes the tensor that travels for a memory; the memory itself without one.

It has as many elements, in any dtype. `torch.distributed` sums it over the machines, and the sum is copied
back into the memory: it stands for that of the memories."""


def _half(memory: Tensor) -> Tensor:
    """Half the bytes of float32; float64 was asked for by the user, and stays."""
    return memory.bfloat16() if memory.dtype == torch.float32 else memory


PACKS: dict[Payload, Pack] = {"full": lambda memory: memory, "bf16": _half}
"""The pack of each `MachineOptions.payload`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A part of a mean on its way.

    Attributes:
        part: The part of this machine's mean, into which that of all comes.
        tensor: The tensor that travels for it; the part itself where dtypes agree.
        operation: Reduction over the machines.
        is_trained: It holds parameters, which travel in every round.
        base: Parameters after the last mean, where differences from it travel.
    """

    part: Tensor
    tensor: Tensor
    operation: Reduction = "sum"
    is_trained: bool = False
    base: Tensor | None = None

    def arrive(self) -> None:
        """Take over the mean of all, now that it is there."""
        if self.tensor is not self.part:
            self.part.copy_(self.tensor)
        if self.base is not None:
            self.base.copy_(self.part.add_(self.base))


class MachinesMean:
    """Averages the memories of all machines.

    All machines get the same bits. Float buffers travel as float64, so that a constant table comes out as it
    went in. Memory: one replica more, in the dtype that `arithmetic` says; with overlap two, and one where
    parameters travel packed.

    Args:
        flats: The layout that all memories have.
        memories: One list for each rank of this machine. It may be filled later, before the first round.
        outer: Outer step of the parameters, after the mean of all machines.
        team: The ranks of all machines. Their order is that of the outcomes.
        is_difference: Parameters are averaged: packed, their differences from the last mean travel;
            else gradients.
        overlaps: Means of parameters travel while the machines train on.

    Attributes:
        ranks: Ranks of this machine among all.
        norm: The norm of the last mean; None where it was not measured, or none has come.
        drifts: Distance of each rank of this machine from it; None likewise, or for one that gave nothing.

    Threads: the last arrival at the gate, but for `settle`.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        memories: Sequence[Sequence[Tensor]],
        outer: OuterMomentum | None,
        team: Team,
        *,
        is_difference: bool,
        overlaps: bool = False,
    ) -> None:
        assert team.machines is not None
        self.ranks = team.ranks
        self.norm: float | None = None
        self.drifts: list[float | None] = [None] * len(memories)
        self._flats, self._memories = flats, memories
        self._machines = team.machines
        self._outer = outer
        self._pack = PACKS[team.options.payload]
        self._means = [torch.empty_like(flat.memory, dtype=_wide(flat), device="cpu") for flat in flats]
        self._bases = self._copies() if team.options.payload != "full" and is_difference else []
        self._given = self._copies() if overlaps else []  # what this machine gave to the mean on its way
        self._on_way: tuple[Callable[[], None], Sequence[_Sent], Outcome] | None = None
        self._rest: Outcome | None = None  # of the last mean, whose buffers did not travel
        self._settling = threading.Lock()  # the first rank that settles does it, the others wait
        # Of this machine's replicas. CUDA ranks have no memory here before their first round.
        self._ours: BlockMean | None = None

    def take(self, outcome: Outcome) -> None:
        """Replace all memories by the mean of all machines; with overlap, bring in the one before."""
        if self._given:
            self._pass_on(outcome)
            return
        self._reduce_ours(outcome)
        self._exchange(self._outgoing(outcome))
        self._measure(self._memories, outcome)
        self._move()
        for memories in self._memories:
            copy_all(self._means, memories)

    def settle(self) -> None:
        """Bring in the mean that is on its way, so that the replicas of all machines are equal.

        Nothing was trained since its round. Every rank calls it; all machines do, at the same barrier.

        Raises:
            CollectiveError: A machine was lost.
        """
        with self._settling:
            self._arrive(is_last=True)
            outcome, self._rest = self._rest, None
            if outcome is not None:
                self._reduce_ours(outcome)
                self._exchange(sent for sent in self._outgoing(outcome) if not sent.is_trained)
                for memories in self._memories:
                    for flat, memory, mean in zip(self._flats, memories, self._means, strict=True):
                        first = 0 if flat.counts else flat.split
                        memory[first:].copy_(mean[first:])

    def _exchange(self, parts: Iterable[_Sent]) -> None:
        """Replace parts of this machine's mean by those of all machines."""
        sent = list(parts)
        self._machines.reduce([part.tensor for part in sent], [part.operation for part in sent])
        for part in sent:
            part.arrive()

    def _pass_on(self, outcome: Outcome) -> None:
        """Bring in the mean of the round before, and send the mean of this machine; see the module."""
        self._arrive(drift=outcome.drift)
        self._reduce_ours(outcome)
        for memories in (self._given, *self._memories):
            copy_all(self._means, memories)
        sent = [part for part in self._outgoing(outcome) if part.is_trained]
        wait = self._machines.begin([part.tensor for part in sent])
        self._on_way, self._rest = (wait, sent, outcome), outcome

    def _arrive(self, *, drift: bool = False, is_last: bool = False) -> None:
        """Bring in the mean that is on its way.

        Args:
            drift: Whether to measure its distance from the mean that this machine gave.
            is_last: Nothing was trained since, so the replicas become the mean, to the bit.
        """
        self.norm, self.drifts = None, [None] * len(self._memories)
        if self._on_way is None:
            return
        wait, sent, outcome = self._on_way
        self._on_way = None
        wait()
        for part in sent:
            part.arrive()
        self._measure([self._given] * len(self._memories), replace(outcome, drift=drift))
        self._move()
        # A machine that gave nothing may have no finite numbers that a difference could be added to.
        replaces = is_last or not (self._weight(outcome) or self._is_finite(self._given))
        for memories in self._memories:
            for flat, memory, mean, given in zip(
                self._flats, memories, self._means, self._given, strict=True
            ):
                if replaces and not flat.counts:
                    memory[: flat.split].copy_(mean[: flat.split])
                elif not flat.counts:
                    shift(replace(flat, memory=memory), mean, given)

    def _move(self) -> None:
        """Take the outer step of the means."""
        if self._outer is not None:
            self._outer.step(self._means)

    def _reduce_ours(self, outcome: Outcome) -> None:
        """Reduce the replicas of this machine."""
        if self._ours is None:
            site = Site(torch.device("cpu"))
            self._ours = BlockMean(self._flats, self._memories, [self._means], site=site)
        weights = outcome.local_weights(self.ranks)
        self._ours.reduce(weights if any(weights) else [1] * len(weights), drift=False)

    def _weight(self, outcome: Outcome) -> float:
        """Part of this machine in the mean of all."""
        weights = outcome.weights
        return sum(weights[rank] for rank in self.ranks) / sum(weights)

    def _outgoing(self, outcome: Outcome) -> Iterator[_Sent]:
        """Make the parts of this machine's mean ready for their way, each times the weight of the machine."""
        weight = self._weight(outcome)
        for index, (flat, mean) in enumerate(zip(self._flats, self._means, strict=True)):
            if flat.counts:
                yield _Sent(mean, mean if mean.dtype in SUMMED else mean.to(torch.int64), "max")
                continue
            parameters, buffers = mean[: flat.split], mean[flat.split :]
            if len(parameters):
                base = self._bases[index][: flat.split] if self._bases else None
                if mean.dtype != torch.float32:  # it travels as it is
                    base = None
                if base is not None:
                    parameters.sub_(base)
                _scale(parameters, weight)
                yield _Sent(parameters, self._pack(parameters), is_trained=True, base=base)
            if len(buffers):
                yield _Sent(buffers, _scale(buffers.to(torch.float64, copy=True), weight))

    def _measure(self, memories: Sequence[Sequence[Tensor]], outcome: Outcome) -> None:
        """Measure the norm of the mean, and the distances of this machine's ranks from it."""
        self.norm, self.drifts = None, [None] * len(memories)
        if not outcome.drift:
            return
        measured = [index for index, flat in enumerate(self._flats) if flat.is_measured and not flat.counts]
        means = [self._means[index][: self._flats[index].split] for index in measured]
        mean_square = sum(_square(mean) for mean in means)
        for place, (rank, ours) in enumerate(zip(self.ranks, memories, strict=True)):
            if outcome.samples[rank]:
                square = sum(
                    _square(ours[index][: len(mean)].to(mean.dtype) - mean)
                    for index, mean in zip(measured, means, strict=True)
                )
                self.drifts[place] = relative_drift(square, mean_square)
        self.norm = sqrt(mean_square)

    def _is_finite(self, memories: Sequence[Tensor]) -> bool:
        """Whether all parameters in some memories are finite."""
        return all(
            bool(torch.isfinite(memory[: flat.split]).all())
            for flat, memory in zip(self._flats, memories, strict=True)
        )

    def _copies(self) -> list[Tensor]:
        """Copies of the first rank's memory, in the dtypes of the means; all ranks begin alike."""
        memories = self._memories[0] or [flat.memory for flat in self._flats]
        return [memory.to(mean, copy=True) for memory, mean in zip(memories, self._means, strict=True)]


def _wide(flat: Flat) -> torch.dtype:
    """The dtype in which a flat is averaged; flags travel as numbers."""
    if flat.counts:
        return torch.uint8 if flat.memory.dtype == torch.bool else flat.memory.dtype
    return arithmetic(flat.memory.dtype)


def _scale(memory: Tensor, weight: float) -> Tensor:
    """Multiply memory; by 0 it becomes 0, whatever it holds: NaN times 0 is NaN."""
    return memory.mul_(weight) if weight else memory.zero_()


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 if tensor.numel() else 0.0
