"""The mean of snapshots, taken while the ranks train on.

Each rank puts a copy of its replica down, a helper averages the copies, and each rank adds the difference
between the mean and its own copy: the steps it took meanwhile are kept.

Order of work on the CUDA streams::

    compute of each rank  ... take | taken         ... (waits mean) apply | applied ...
    comm of one rank      (waits taken, applied of the round before) | average | mean
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from math import sqrt

import torch
from torch import Tensor

from flowdp.collective.fused import kernels_on
from flowdp.collective.mean import BlockMean, Site, arithmetic, copy_all, relative_drift, shift
from flowdp.collective.outer import OuterMomentum
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import OptionError, ProtocolError

__all__ = ["SnapshotMean"]


class SnapshotMean:
    """A slot per rank and their mean, all tagged with the round they belong to.

    A slot that does not belong to the round is never averaged or applied. Memory: one replica per rank and
    one for the mean on each device (bfloat16 and float16 parameters in float32), made at the first use and
    kept.

    Args:
        replicas: One per rank.
        lanes: One per rank.
        outer: Momentum of each rank, as the blocking rounds have it: the mean of the snapshots has an outer
            step with it. Ranks on the CPU share one. Empty: it is the plain mean.

    Raises:
        OptionError: CUDA ranks share a momentum, in the host's memory.

    Threads: ranks take and apply at the same time, the helper averages between. That `take` of the next
        round comes after every `apply` of this one, if there is one, is the coordinator's promise.
    Streams: ranks take and apply with their `compute` current; the mean is taken on `comm`.
    """

    def __init__(
        self, replicas: Sequence[FlatTensors], lanes: Sequence[Lane], outer: Sequence[OuterMomentum] = ()
    ) -> None:
        self._shared, self._own = _outer(outer, lanes)
        self._replicas = tuple(replicas)
        self._lanes = tuple(lanes)
        self._slots: list[list[Tensor]] = [[] for _ in replicas]
        self._taken: list[int | None] = [None] * len(replicas)
        self._mean: dict[torch.device, list[Tensor]] = {}
        self._parts: tuple[Sequence[int], BlockMean] | None = None
        self._averaged: int | None = None
        self._copied = [lane.event() for lane in lanes]
        self._applied = [lane.event() for lane in lanes]
        self._marks = [(lane.event(timing=True), lane.event(timing=True)) for lane in lanes]
        self._mean_ready: Event | None = None

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
        copy_all(replica.memories, self._slots[rank])
        self._copied[rank].record(self._lanes[rank].compute)
        self._taken[rank] = round

    def average(self, round: int, samples: Sequence[int]) -> tuple[float, tuple[float, ...]]:
        """Average the snapshots of a round.

        Args:
            round: Round number.
            samples: Weight per rank. Shape (world_size,). A rank with 0 need not have a snapshot.

        Returns:
            Time it took, in milliseconds, and the drift ||snapshot - mean|| / ||mean|| per rank, 0.0 for
            one without samples.

        Raises:
            ProtocolError: A rank with samples has no snapshot of this round, or no rank has samples.

        Threads: the helper; no rank takes or applies meanwhile.
        """
        for rank, count in enumerate(samples):
            if count and self._taken[rank] != round:
                raise ProtocolError(
                    f"the snapshot of rank {rank} is of round {self._taken[rank]}, not of round {round}"
                )
        members = [rank for rank, taken in enumerate(self._taken) if taken == round]
        if not members:
            raise ProtocolError(f"no rank has a snapshot of round {round} to average")
        self._averaged = None
        # On a device if there is one: work of the host is done when the call returns, so no event is needed.
        home = next((member for member in members if self._lanes[member].is_async), members[0])
        lane, (start, end) = self._lanes[home], self._marks[home]
        with ExitStack() as stack:
            # First-use allocations happen while no grouped collective is being launched.
            stack.enter_context(QUIET if lane.is_async else nullcontext())
            others = {other.device: other for other in self._lanes if other.device != lane.device}
            lanes = [*others.values(), lane]  # one on each device
            for other in lanes:
                # Torch orders a copy between two devices with the current streams of both.
                stack.enter_context(other.on(other.comm))
                self._wait_for(other, members)
            start.record(lane.comm)
            squares = self._mean_of(members, home).reduce([samples[member] for member in members], drift=True)
            assert squares is not None
            row = lane.pinned(squares.shape, squares.dtype)  # to read an accelerator's tensor would wait, too
            row.copy_(squares, non_blocking=True)
            if not lane.is_async:  # no mark of its own tells when the copies to other devices are done
                for other in lanes:
                    other.comm.synchronize()
            end.record(lane.comm)
        end.synchronize()
        *distances, mean_square = row.tolist()
        self.norm = sqrt(mean_square)
        drifts = [0.0] * len(samples)
        for member, square in zip(members, distances, strict=True):
            drifts[member] = relative_drift(square, mean_square)
        self._mean_ready = end if lane.is_async else None
        self._averaged = round
        return start.elapsed_time(end), tuple(drifts)

    def apply(self, rank: int, round: int, steps: int) -> None:
        """Bring the mean into the replica, once.

        Parameters move by `mean - snapshot`, so no local step is lost. Where there is none they become the
        mean to the bit, which the rounding of a difference would miss: if no rank has stepped since, the next
        meeting has no samples to average, and the replicas must be equal without it. Float buffers are
        replaced: a difference can make a variance negative. Integers and flags take the maximum.

        Args:
            rank: Rank index.
            round: Round number.
            steps: Steps that the rank has taken since its snapshot.

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
        replica, lane = self._replicas[rank], self._lanes[rank]
        if self._mean_ready is not None:
            lane.compute.wait_event(self._mean_ready)
        replica.gather()
        means = self._mean[lane.device]
        if self._own:
            means = [mean.clone() for mean in means]  # other ranks of the device read the plain one
            self._own[rank].step(means)
        for flat, mean, slot in zip(replica.flats, means, self._slots[rank], strict=True):
            if flat.counts:
                torch.maximum(flat.memory, mean, out=flat.memory)
            else:
                start = 0
                if steps:
                    shift(flat, mean, slot)
                    start = flat.split
                flat.memory[start:].copy_(mean[start:])
        replica.scatter()
        self._applied[rank].record(lane.compute)
        self._taken[rank] = None

    def _wait_for(self, lane: Lane, members: Sequence[int]) -> None:
        """Let a comm stream wait for the slots, and for the last mean to be read."""
        for rank, other in enumerate(self._lanes):
            if other.is_async:
                lane.comm.wait_event(self._applied[rank])
                if rank in members:
                    lane.comm.wait_event(self._copied[rank])

    def _mean_of(self, members: Sequence[int], home: int) -> BlockMean:
        for replica, lane in zip(self._replicas, self._lanes, strict=True):
            if lane.device not in self._mean:
                self._mean[lane.device] = [
                    torch.empty(
                        flat.memory.shape,
                        dtype=flat.memory.dtype if flat.counts else arithmetic(flat.memory.dtype),
                        device=flat.memory.device,
                    )
                    for flat in replica.flats
                ]
        if self._parts is None or self._parts[0] != members:
            here = self._lanes[home].device
            kernels = kernels_on(here, len(members)) if self._lanes[home].is_async else None
            far = [at for at, member in enumerate(members) if self._lanes[member].device != here]
            mean = BlockMean(
                self._replicas[home].flats,
                [self._slots[member] for member in members],
                [self._mean[here], *(memories for at, memories in self._mean.items() if at != here)],
                site=Site(kernels=kernels, far=far),
                outer=self._shared,
            )
            self._parts = members, mean
        return self._parts[1]


def _outer(
    outer: Sequence[OuterMomentum], lanes: Sequence[Lane]
) -> tuple[OuterMomentum | None, Sequence[OuterMomentum]]:
    """The momentum with which the helper moves a mean on the host, or those of the ranks on devices."""
    if not outer or not any(lane.is_async for lane in lanes):
        return (outer[0] if outer else None), ()
    if len({id(momentum) for momentum in outer}) < len(outer):
        raise OptionError(
            "policy='async' cannot have outer= here: these CUDA devices average through the host's memory in "
            "one kind of round and on a device in the other. Use policy='cadence', or leave outer out"
        )
    return None, outer
