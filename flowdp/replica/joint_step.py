"""The step that all ranks of a process take together (exact), and the owner of the parameters.

Where a rank trains on the CPU, or ranks on cards of different kinds, one rank of each machine owns all
parameters: it alone steps them, and all others receive the new values. So the replicas are equal by
construction, and the state of the optimizer is there once. A small model on the CPU is stepped by the last
arrival at the gate, for all ranks, while they stand there. On cards of one kind, which come to the same bits,
each rank steps all; where the optimizer allows it, they step spans instead (`SpanStep`). All machines step by
the same mean gradient; where their devices round differently, their replicas differ by these roundings.

For `SpanStep` the flat memory is cut into equal spans, one for each rank, wherever its parameters begin. A
rank gets the mean gradient of its span alone, has the state of the optimizer for it, steps it, and gives the
new values to all others: equal by construction, whatever kinds of card they lie on. All of it is a part of
the round: the last arrival at the gate puts it on the comm streams of all ranks, behind the mean, while the
others stand in the gate. So one gate is enough, no host waits, and the stream of a rank orders sum, step and
copies by itself. Its compute stream goes on behind the round, as behind any mean.

Source: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakMethod

import torch

from flowdp.collective.base import Averaging, Collective, Reading
from flowdp.collective.host import HostMean
from flowdp.collective.on_streams import StreamedMean
from flowdp.protocol.messages import Outcome
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.flat_optimizer import joined_state

__all__ = ["JointStep", "SpanStep", "cut_gradients", "owner_of"]


def owner_of(replicas: Sequence[ExactReplica]) -> int | None:
    """The rank of this machine that owns all parameters, a card before the CPU; None: each steps all of them.

    That is so on cards of one kind, and with one rank.
    """
    if len(replicas) == 1:
        return None
    cards = [rank for rank, replica in enumerate(replicas) if replica.lane.is_async]
    if len(cards) == len(replicas) and len({replica.lane.kind for replica in replicas}) == 1:
        return None
    return cards[0] if cards else 0


class JointStep:
    """Steps the parameters of all replicas of a process by their mean gradient.

    Args:
        replicas: In the order of their ranks.
        collective: Averages their gradients. Where its launch leaves the mean in the memory of all ranks, the
            last arrival may take the step.
        meet: `meet(rank)` returns when all members of the round have called it; see `Gate.finish`.

    Threads:
        As the methods say.
    """

    def __init__(
        self, replicas: Sequence[ExactReplica], collective: Collective, meet: Callable[[int], None]
    ) -> None:
        self._replicas = tuple(replicas)
        self._collective = collective
        self._meet = meet
        self._owner = owner_of(replicas)
        is_launched = isinstance(collective, HostMean) and collective.is_launched
        self._at_once = is_launched and self._owner is not None
        self._taken: Outcome | None = None
        self._launch_ms = 0.0
        if self._owner is not None:
            for replica in replicas:
                replica.follow(replicas[self._owner])
            self._given = replicas[self._owner].lane.event()

    def launch(self, outcome: Outcome) -> None:
        """Launch the mean of a round; take the step for all ranks, where one owns all and the mean is there.

        Threads:
            The last arrival at the gate, while all others stand in it.
        """
        self._collective.launch(outcome)
        self._taken = None
        is_alone = outcome.window is None or outcome.window.alone
        if is_alone or not (self._at_once and any(outcome.samples)):
            return
        start_s = perf_counter()
        assert self._owner is not None
        owner = self._replicas[self._owner]
        if outcome.lr:
            owner.learning_rate.rescale(outcome)
        owner.meet(outcome)
        self._give()
        for replica in self._replicas:
            if replica is not owner:
                replica.received()
                replica.gradients.clear()
        self._taken = outcome
        self._launch_ms = (perf_counter() - start_s) * 1e3

    def step(self, rank: int, outcome: Outcome) -> None:
        """Take this rank's part of the step: all of it, or receive what the owner has made.

        Raises:
            CollectiveAborted: The round was given up meanwhile.

        Threads:
            Worker `rank`, behind the mean, with the learning rate of the step.

        Streams:
            As `Replica.step`. The host of an owner waits for its device where others are on the CPU.
        """
        replica = self._replicas[rank]
        if self._taken is not outcome:
            replica.meet(outcome)
            if self._owner is not None:
                # The owner gives: behind the meeting a callback, or a forward, may write to its own.
                if rank == self._owner:
                    self._give()
                    self._given.record(replica.lane.compute)
                    if not all(other.lane.is_async for other in self._replicas):
                        self._given.synchronize()
                self._meet(rank)
                if rank != self._owner:
                    replica.lane.compute.wait_event(self._given)
                    replica.received()
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
        self._replicas[rank].end_alone()
        self._meet(rank)
        averaging = Averaging((perf_counter() - start_s) * 1e3, None)
        return lambda: averaging

    @torch.no_grad()
    def _give(self) -> None:
        """Write the owner's parameters to the memory of all others, who do not touch theirs now."""
        assert self._owner is not None
        owner = self._replicas[self._owner]
        for replica in self._replicas:
            if replica is not owner:
                for theirs, mine in zip(replica.flat.trained(), owner.flat.trained(), strict=True):
                    theirs.copy_(mine)


def cut_gradients(replicas: Sequence[ExactReplica]) -> bool:
    """Cut the gradients that the ranks average into spans, if each can step one; returns whether.

    Threads:
        The one that builds, before the collective is opened.
    """
    can = len(replicas) > 1 and all(replica.can_have_span for replica in replicas)
    for replica in replicas if can else ():
        replica.gradients.cut()
    return can


class SpanStep:
    """Steps the parameters of all replicas of a process, each rank a span of them.

    Args:
        replicas: In the order of their ranks; their gradients are cut.
        collective: Averages these.

    Threads:
        As the methods say.
    """

    def __init__(self, replicas: Sequence[ExactReplica], collective: StreamedMean) -> None:
        self._replicas = tuple(replicas)
        self._collective = collective
        self._owners = [replica.own_span() for replica in replicas]
        for replica in replicas:
            replica.whole_state = WeakMethod(self.whole_state)

    def launch(self, outcome: Outcome) -> None:
        """Launch the mean of a round, and the step behind it.

        Threads:
            The last arrival at the gate, while all others stand in it.

        Streams:
            On the comm streams. The host waits as in `SharedGradients.look`.
        """
        self._collective.launch(outcome, partial(self._step, outcome))

    def step(self, rank: int, _outcome: Outcome) -> None:
        """Bring the step to autograd and to the moving average, and begin another sum of gradients.

        Threads:
            Worker `rank`, behind the mean.

        Streams:
            On `compute`, which has waited for the round.
        """
        replica = self._replicas[rank]
        # By its version autograd sees that a parameter has changed since a forward used it.
        torch.autograd.graph.increment_version(replica.gradients.parameters)
        replica.gradients.clear()
        if replica.average is not None:
            replica.average.update()

    def whole_state(self) -> dict[str, Any]:
        """The `state_dict()` of the optimizer, with the state of all ranks; see `joined_state`."""
        return joined_state(self._owners)

    def _step(self, outcome: Outcome) -> None:
        first, window = self._replicas[0], outcome.window
        assert window is not None
        with first.lane.on(first.lane.comm):
            touched, is_weighted = first.gradients.look(window.touched)
        for replica in self._replicas:
            with replica.lane.on(replica.lane.comm):
                if outcome.lr:
                    replica.learning_rate.rescale(outcome)
                replica.gradients.divide(is_weighted=is_weighted)
                if replica.update.clips_norm:
                    replica.gradients.measure()
        if first.update.clips_norm:
            squares = [replica.gradients.square for replica in self._replicas]
            for replica, total in zip(self._replicas, self._collective.add_up(squares), strict=True):
                replica.gradients.sum_of_squares = total
        for replica in self._replicas:
            with replica.lane.on(replica.lane.comm):
                replica.update.step_span(touched)
        self._collective.spread([replica.flat for replica in self._replicas])
