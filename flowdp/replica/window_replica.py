"""Replicas of policy="exact" that wait for no other: forward and backward of a global batch, or a part of it.

A rank's part of a window is trained in micro-batches. Each one's mean loss counts for its samples in the
part, so the gradient is the mean over its samples. Where a loss names its weight, say its tokens, it counts
for that.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from flowdp.data.batches import Portion, cuts
from flowdp.device.compiled import as_written, uses_compile
from flowdp.device.draws import OwnDraws, SeededCalls
from flowdp.device.gathered import Gathered, made
from flowdp.device.trees import tensors_of
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Computed, Factors
from flowdp.policy.schedule import Recheck, is_due_at
from flowdp.protocol.messages import SampleRange
from flowdp.replica.loss import Loss
from flowdp.replica.loss_check import check_mean
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.replica import Replica, whole_batch

__all__ = ["LoneReplica", "WindowReplica"]

log = logging.getLogger("flowdp")

IGNORED = -100
"""Label that torch's losses leave out by default."""

LABELS = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of labels that can be that."""


class WindowReplica(Replica):
    """Replica that trains a global batch, or a part of one, in micro-batches.

    Args:
        parts: Objects and settings of this rank.
        loss: Loss of (module, batch).
        size: Samples of a micro-batch, at most.
        seed: Seed of this rank's reproducible draws; None: torch's own generator.
        checks: Whether the loss is checked, in the windows 1, 2, 4, 8, ... (by the first rank, and by others
            that have a label which losses leave out); see `check_mean`.
    """

    def __init__(
        self, parts: ReplicaParts, loss: Loss, *, size: int, seed: int | None = None, checks: bool = False
    ) -> None:
        super().__init__(parts, loss)
        self._seed = seed if self.device.type == "cpu" else None  # a card has a generator of its own
        self._is_compiled = uses_compile(self.module, loss)
        self._checks = checks
        self._drawing: AbstractContextManager[object] = nullcontext()  # of each forward and backward
        self._has_looked = False
        self._looks = Recheck()  # for draws in a backward
        self._size = size
        self.least = min(self.least, size)  # with batch_size=1 each forward equals that of one device

    def add(self, batch: Portion | Gathered, worker: CurrentWorker, _share: float = 1.0) -> None:
        """Forward and backward of this rank's part, in micro-batches; see `Replica.add`."""
        samples = batch.samples
        # By the window, which all ranks count alike: a slow one may have no part of some.
        is_due = not self._has_looked or is_due_at(worker.global_step + 1)
        unchecked = ""
        if self._checks and samples > 1 and is_due:
            self._has_looked = True
            unchecked = self._check_loss(batch, worker)
        part = self.part or SampleRange(0, samples)
        pieces = part.forwards or self.forwards(batch, samples)
        with self._beside_others(part, samples):
            # By the window, so that a run that goes on from a checkpoint draws as one that did not end.
            if self._seed is not None:
                self.draws = self._drawing = OwnDraws(self._seed, self.flat.rank, worker.global_step)
                if not (self._is_compiled or self._looks.is_due):  # a look for draws in the backward
                    self._drawing = SeededCalls(self.draws)
            for start, stop in cuts(samples, pieces):
                worker.samples = stop - start
                factors = Factors(worker.samples / samples, worker.samples)
                self._compute(batch.rows(start, stop), worker, factors)
        if unchecked:  # and the step has not failed for the same reason
            self._checks = False
            log.warning("it could not be checked that the loss is a mean: %s", unchecked)
        if not self.has_stepped:
            self._check_first()
        self._looks.passed()

    def _beside_others(self, _part: SampleRange, _samples: int) -> AbstractContextManager[object]:
        """Context of the forwards of a part, for layers that meet the other ranks."""
        return nullcontext()

    def forwards(self, _batch: Any, samples: int) -> int:  # a part can always be cut
        """See `Replica.forwards`."""
        return max(1, min(samples // self.least, -(-samples // self._size) * self.pieces))

    def compute(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed:
        """See `Replica.compute`."""
        with self._drawing:
            return super().compute(batch, worker, factors)

    def _check_loss(self, batch: Portion | Gathered, worker: CurrentWorker) -> str:
        samples = min(batch.samples, max(2, self._size))
        starts = (min(start, batch.samples - samples) for start in range(0, batch.samples, samples))
        # A mean that leaves labels out differs from one over samples only where there are such labels.
        at = next((start for start in starts if _ignores(made(batch.rows(start, start + samples)))), None)
        if at is None and self.part is not None and self.part.start:
            return ""  # the rank with the first part looks at any other
        begin = at or 0

        def rows(start: int, stop: int) -> Any:
            worker.samples = stop - start
            return made(batch.rows(begin + start, begin + stop))

        sink, worker.sink = worker.sink, lambda *_: None  # it is no step, and records nothing
        try:
            return check_mean(self.module, self._under_autocast, rows, samples, self.device)
        finally:
            worker.sink = sink

    def _under_autocast(self, module: nn.Module, batch: Any) -> Any:
        with self.casting():
            # As written: in a trial dynamo would take it for one that cannot be compiled.
            return as_written(self.function)(module, batch)


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


def _ignores(batch: Any) -> bool:
    """Whether a label of the batch is the one that losses leave out."""
    return any(bool((leaf == IGNORED).any()) for leaf in tensors_of(batch) if leaf.dtype in LABELS)
