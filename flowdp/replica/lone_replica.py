"""The replica of policy="exact" on one device, which has every global batch to itself."""

from __future__ import annotations

from typing import Any

from flowdp.data.batches import Portion
from flowdp.device.gathered import Gathered, made
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Factors
from flowdp.replica.replica import whole_batch
from flowdp.replica.window_replica import WindowReplica

__all__ = ["LoneReplica"]


class LoneReplica(WindowReplica):
    """Replica that waits for no other: a batch that fits into one forward is trained as in plain torch."""

    def add(self, batch: Any, worker: CurrentWorker, share: float = 1.0) -> None:
        """Forward and backward of a global batch; see `Replica.add`."""
        samples = worker.samples
        if samples > self._size or self.pieces > 1 or self._seed is not None:
            portion = batch if type(batch) is Gathered else Portion.of(batch, samples)
            super().add(portion, worker, share)
            return
        # Its loss may be anything, and the batch need not be one that can be cut.
        self._compute(batch, worker, Factors(share, samples))
        if not self.has_stepped:
            self._check_first()

    def forwards(self, batch: Any, samples: int) -> int:
        """Number of forwards for a batch of this many samples; 1 where it cannot be cut."""
        return 1 if whole_batch(made(batch), samples) is None else super().forwards(batch, samples)
