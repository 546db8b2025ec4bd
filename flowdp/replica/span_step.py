"""The step of several CUDA devices of one process, each of which steps a span of the parameters (exact).

The flat memory is cut into equal spans, one for each rank, wherever its parameters begin. A rank gets the
mean gradient of its span alone, has the state of the optimizer for it, steps it, and gives the new values to
all others. So the replicas are equal by construction, whatever kinds of card they lie on, and state and step
are there once.

All of it is a part of the round: the last arrival at the gate puts it on the comm streams of all ranks,
behind the mean, while the others stand in the gate. So one gate is enough, no host waits, and the stream of a
rank orders sum, step and copies by itself. Its compute stream goes on behind the round, as behind any mean.

Source: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from flowdp.collective.on_streams import StreamedMean
from flowdp.protocol.messages import Outcome
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.flat_optimizer import joined_state

__all__ = ["SpanStep", "cut_gradients"]


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
                if outcome.lr is not None:
                    replica.learning_rate.scale(outcome.lr)
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
