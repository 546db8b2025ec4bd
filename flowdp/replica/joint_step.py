"""The step that all ranks of a process take together (exact), and the owners of the parameters.

Where a rank trains on the CPU, each parameter has one owner: that rank alone steps it, and all others receive
its new values. So the replicas are equal by construction, whatever kinds of device they lie on, and the state
of the optimizer is there once. A small model has one owner, and the last arrival at the gate steps it for all
ranks while they stand there. The parameters of a large one on CPUs are divided, and the ranks step theirs at
once. Ranks on cards of one kind come to the same bits by themselves: each steps all parameters.

Source: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from flowdp.collective.base import Averaging, Reading
from flowdp.collective.memory_mean import SMALL
from flowdp.policy.owners import divide
from flowdp.protocol.messages import Outcome
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.flat_optimizer import steps_one_by_one

__all__ = ["JointStep", "has_one_owner"]


def has_owners(replicas: Sequence[ExactReplica]) -> bool:
    """Whether each parameter has one owner: a rank trains on the CPU, and no other machine takes the step."""
    is_here = not replicas[0].gradients.travels
    return is_here and len(replicas) > 1 and any(not replica.lane.is_async for replica in replicas)


def has_one_owner(replicas: Sequence[ExactReplica]) -> bool:
    """Whether one rank owns all parameters, so that it can train alone."""
    first = replicas[0]
    is_large = sum(len(flat.memory) for flat in first.gradients.flats) > SMALL
    is_divided = (
        is_large
        and not any(replica.lane.is_async for replica in replicas)
        and not first.scales_loss  # by one flag of all gradients
        and steps_one_by_one(first.optimizer)
    )
    return has_owners(replicas) and not is_divided


class JointStep:
    """Steps the parameters of all replicas of a process by their mean gradient.

    Args:
        replicas: In the order of their ranks.
        meet: `meet(rank)` returns when all members of the round have called it; see `Gate.finish`.
        at_once: Whether the last arrival has the mean in the memory of all ranks, and may take the step.

    Threads:
        As the methods say.
    """

    def __init__(
        self, replicas: Sequence[ExactReplica], meet: Callable[[int], None], *, at_once: bool
    ) -> None:
        self._replicas = tuple(replicas)
        self._meet = meet
        self._owners: tuple[int, ...] = ()  # of each parameter; empty: each rank steps all
        self._given: list[list[tuple[Tensor, Tensor]]] = []  # of each rank: another's memory, and its own
        self._taken: Outcome | None = None
        self._at_once = False
        self._launch_ms = 0.0
        if not has_owners(replicas):
            return
        sizes = [parameter.numel() for parameter in replicas[0].gradients.parameters]
        if has_one_owner(replicas):
            first = next((rank for rank, one in enumerate(replicas) if one.lane.is_async), 0)
            self._owners = (first,) * len(sizes)
            self._at_once = at_once
        else:
            self._owners = divide(sizes, len(replicas))
        pieces = [replica.flat.pieces(self._owners) for replica in replicas]
        for rank, replica in enumerate(replicas):
            replica.own([owner == rank for owner in self._owners])
            replica.whole_state = WeakMethod(self.whole_state)
            self._given.append(
                [
                    (theirs, mine)
                    for others in pieces
                    if others is not pieces[rank]
                    for (owner, theirs), (_, mine) in zip(others, pieces[rank], strict=True)
                    if owner == rank
                ]
            )

    def launch(self, outcome: Outcome) -> None:
        """Take the step for all ranks, where one owns all parameters and the mean is there.

        Threads:
            The last arrival at the gate, behind the launch of the mean, while all others stand in it.
        """
        self._taken = None
        # A new rate is set by each worker, behind the gate.
        if not (self._at_once and outcome.together and any(outcome.samples)) or outcome.lr is not None:
            return
        start_s = perf_counter()
        owner = self._owners[0]
        self._replicas[owner].take_step(outcome)
        self._give(owner)
        for rank in outcome.members:
            if rank != owner:
                self._replicas[rank].received(self._replicas[owner])
                self._replicas[rank].gradients.clear()
        self._taken = outcome
        self._launch_ms = (perf_counter() - start_s) * 1e3

    def step(self, rank: int, outcome: Outcome) -> None:
        """Take this rank's part of the step, give it to the others, and receive theirs.

        Raises:
            CollectiveAborted: The round was given up meanwhile.

        Threads:
            Worker `rank`, behind the mean, with the learning rate of the step.

        Streams:
            As `Replica.step`. Where parameters have owners, the host waits for those of a device.
        """
        replica = self._replicas[rank]
        if self._taken is not outcome:
            replica.meet(outcome)
            if self._owners:
                # A step reads all parameters that lie outside of the flat memory. And owners give, for behind
                # the last meeting a callback, or a forward, may write to its own.
                self._meet(rank)
                self._give(rank)
                if replica.lane.is_async:
                    replica.lane.drain()
                self._meet(rank)
                if any(owner != rank for owner in self._owners):
                    replica.received(self._replicas[self._owners[0]])
        if replica.average is not None:
            replica.average.update()

    def timed(self, reading: Reading, outcome: Outcome) -> Reading:
        """A reading of a mean with the time of the step that the last arrival has taken behind it."""
        if self._taken is not outcome:
            return reading
        launch_ms = self._launch_ms

        def read() -> Averaging:
            averaging = reading()
            return replace(averaging, sync_ms=averaging.sync_ms + launch_ms)

        return read

    def copy_step(self, rank: int, outcome: Outcome) -> Reading:
        """Copy the replica that has taken all steps of a round to this rank's; returns the time.

        Threads:
            Worker `rank`, behind the gate. No rank trains before all have called it.
        """
        start_s = perf_counter()
        donor = next((member for member in outcome.members if outcome.steps[member]), rank)
        if donor != rank:
            self._replicas[rank].copy_from(self._replicas[donor])
        self._replicas[rank].left_out = False
        self._meet(rank)
        averaging = Averaging((perf_counter() - start_s) * 1e3, None)
        return lambda: averaging

    def whole_state(self) -> dict[str, Any]:
        """The `state_dict()` of the optimizer, with the state of all parameters.

        Threads:
            Any, while no replica is stepped.
        """
        first, *others = sorted(set(self._owners))
        whole: dict[str, Any] = self._replicas[first].optimizer.state_dict()
        for rank in others:  # of torch's optimizers alone, whose state goes by the number of the parameter
            whole["state"] |= self._replicas[rank].optimizer.state_dict()["state"]
        return whole

    @torch.no_grad()
    def _give(self, rank: int) -> None:
        """Write the parameters that a rank owns to the memory of all others, who do not touch them now."""
        for theirs, mine in self._given[rank]:
            theirs.copy_(mine)
