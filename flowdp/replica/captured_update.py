"""The optimizer's step of a rank on CUDA as a graph: clipping, the step on flat memory, the moving average.

It follows captured forwards and backwards, in a graph of its own: a mean may lie in between, and several
micro-batches. All of it is flowdp's and torch's code, so no eager step is run beside it; it is recorded anew
when anything but a learning rate has changed that a step reads from Python.

Learning rates are numbers on the device, in float32, which a graph reads when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowdp.device.cuda_graphs import Graph, GraphPool
from flowdp.device.streams import StreamLane
from flowdp.policy.worth import FUTILE, PAYS
from flowdp.replica.flat_optimizer import FlatOptimizer

__all__ = ["CapturedUpdate"]


class CapturedUpdate:
    """Runs the optimizer's steps of a rank by a graph, where they can be recorded.

    Args:
        optimizer: Steps the flat memory.
        lane: Lane of the rank.
        work: The step with the optimizer that it is given, and all that goes with it; returns the norms of
            gradients that were clipped. It must have run before.

    Threads:
        The owner of the replica.

    Streams:
        On the current one; nothing is read back.
    """

    def __init__(
        self, optimizer: FlatOptimizer, lane: StreamLane, work: Callable[[Optimizer], Sequence[Tensor]]
    ) -> None:
        self._optimizer = optimizer
        self._lane = lane
        self._pool: GraphPool | None = None
        self._work = work
        self._graph: Graph | None = None
        self._key: object = None  # of the graph: what it depends on
        self._runs = self._futile = 0
        self._rates: list[Tensor] = []
        self._known: Sequence[float] = ()  # the rates that lie there
        self._norms: Sequence[Tensor] = ()

    def run(self, touched: Sequence[bool]) -> Sequence[Tensor] | None:
        """Take a step; None: nothing was done, and it is to be taken eagerly.

        Args:
            touched: Flag per parameter: it has a gradient.

        Returns:
            The norms, in memory of the graph, until it runs again.
        """
        optimizer = self._optimizer
        if self._futile == FUTILE:
            return None
        if optimizer.graph_key(touched) != self._key and not self._record(touched):
            return None
        rates = optimizer.rates
        if rates != self._known:
            torch._foreach_zero_(self._rates)
            torch._foreach_add_(self._rates, rates)
            self._known = rates
        assert self._graph is not None
        self._graph.replay()
        self._runs += 1
        optimizer.finish()
        return self._norms

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph = self._key = None
        self._norms = self._known = ()
        if self._pool is not None:
            self._pool.clear()

    def _record(self, touched: Sequence[bool]) -> bool:
        """Record the step, which does not run yet; returns whether that has worked."""
        if self._runs < PAYS:
            self._futile += 1
        self.close()
        self._runs = 0
        optimizer = self._optimizer
        twin = optimizer.prepare(touched)
        if not optimizer.can_be_recorded():
            return False  # in this step, or in none
        self._rates = [torch.zeros((), device=self._lane.device) for _ in optimizer.rates]
        pool = self._pool = self._pool or GraphPool(self._lane)

        def recorded() -> None:
            with optimizer.recording(self._rates):
                self._norms = self._work(twin)

        try:
            self._graph = pool.capture(recorded)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._futile = FUTILE
            return False
        self._key = optimizer.graph_key(touched)
        return True
