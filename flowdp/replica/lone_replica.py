"""The replica of policy="exact" on one device, which has every global batch to itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowdp.data.batches import Portion
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Computed, Factors
from flowdp.replica.replica import whole_batch
from flowdp.replica.window_replica import WindowReplica

__all__ = ["LoneReplica"]


class LoneReplica(WindowReplica):
    """Replica that waits for no other: a batch that fits into one forward is trained as in plain torch."""

    _weight: Tensor | None = None  # of the step's losses, per sample, where one named it
    _unnamed = 0.0  # part of the samples whose losses named none

    def add(self, batch: Any, worker: CurrentWorker, share: float = 1.0) -> None:
        """Forward and backward of a global batch; see `Replica.add`."""
        samples = worker.samples
        if samples > self._size or self.pieces > 1 or self._seed is not None:
            super().add(Portion.of(batch, samples), worker, share)
            return
        # Its loss may be anything, and the batch need not be one that can be cut.
        self._compute(batch, worker, Factors(share, samples))
        if not self.has_stepped:
            self._check_first()

    def forwards(self, batch: Any, samples: int) -> int:
        """Number of forwards for a batch of this many samples; 1 where it cannot be cut."""
        return 1 if whole_batch(batch, samples) is None else super().forwards(batch, samples)

    def undo(self) -> None:
        """Forget forward and backward; see `Replica.undo`."""
        super().undo()
        self._weight, self._unnamed = None, 0.0

    def step(self, factor: float | Tensor = 1.0) -> Tensor | None:
        """Step the optimizer; the loss is the mean of loss x weight where losses name weights."""
        weight, unnamed, self._weight, self._unnamed = self._weight, self._unnamed, None, 0.0
        if weight is None:
            self.loss_weight = None
            return super().step(factor)
        weight = self.loss_weight = weight + unnamed
        # The gradients are those of loss x weight; a mean over nothing has none.
        value = super().step(1.0 / torch.where(weight == 0, 1.0, weight))
        return None if value is None else value * weight

    def count(self, computed: Computed, factors: Factors) -> None:
        """See `Replica.count`."""
        super().count(computed, factors)
        if computed.weight is None:
            self._unnamed += factors.share
        else:
            self._weight = computed.weight if self._weight is None else self._weight + computed.weight
