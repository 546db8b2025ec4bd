"""The replica of policy="exact": gradients are averaged, and all ranks take the same step behind the gate.

A rank's part of a window is trained in micro-batches. Each one's mean loss counts for its samples in the
part, so the gradient that a rank brings is the mean over its samples; and the mean of the ranks' gradients,
weighted by their samples, is that of the whole window. Where a loss names its weight, say its tokens, it
counts for that; the weights are averaged with the gradients, which are divided by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics, WindowGroups
from flowdp.data.batches import Portion, cuts
from flowdp.data.trees import tensors_of
from flowdp.device.compiled import as_written
from flowdp.device.draws import OwnDraws
from flowdp.device.flat_gradients import SharedGradients, Touched
from flowdp.device.streams import QUIET
from flowdp.device.worker_context import CurrentWorker
from flowdp.graphs.base import Computed, Factors
from flowdp.modules.whole_batch import Written
from flowdp.policy.recheck import is_due_at
from flowdp.protocol.messages import Outcome, SampleRange
from flowdp.replica.loss_check import check_mean
from flowdp.replica.replica import NOT_OURS, Loss, Replica, ReplicaParts

__all__ = ["ExactReplica"]

CHECKSUMS = 8
"""Checksums that may be on their way to the host: more than rounds can be under way on a device."""

IGNORED = -100
"""Label that torch's losses leave out by default."""

LABELS = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of labels that can be that."""


class ExactReplica(Replica):
    """Replica whose optimizer steps by the mean gradient of all ranks.

    Args:
        parts: Objects and settings of this rank.
        loss: Loss of (module, batch).
        size: Samples of a micro-batch, at most.
        touched: Table of parameters with gradients, shared by the ranks.
        groups: Groups of the ranks that have a part of a window, for SyncBatchNorm.
        seed: Seed of this rank's reproducible draws; None: torch's own generator.
        checks: Whether the loss is checked, in the windows 1, 2, 4, 8, ... (by the first rank, and by others
            that have a label which losses leave out); see `check_mean`.

    Raises:
        OptionError: See `SharedGradients`.
    """

    gradients: SharedGradients
    steps_at_gate = True

    names_weight = True

    def __init__(
        self,
        parts: ReplicaParts,
        loss: Loss,
        *,
        size: int,
        touched: Touched,
        groups: WindowGroups,
        seed: int | None = None,
        checks: bool = False,
    ) -> None:
        self._touched = touched
        super().__init__(parts, loss)
        self._seed = seed if self.device.type == "cpu" else None  # a card has a generator of its own
        self._checks = checks
        self._has_looked = False
        self._is_part = touched.world_size > 1  # its part of a window
        self._groups = groups
        self._norms = SharedStatistics(self.module)
        self.meets = bool(self._norms)
        # A step that ran out of memory on one rank cannot be repeated without the others.
        self.can_repeat = not self.meets
        self.averaged = self.gradients
        # An overflow of a scaled loss is the scaler's: it finds it in the mean, and leaves the step out.
        self.watched = self.gradients if self._scaler is None else None
        self._size = size
        self.least = min(self.least, size)  # with batch_size=1 each forward equals that of one device
        self._named: Any = None  # the weight of the micro-batch's loss, if it names one
        self._unnamed = 0.0  # weight of the part's losses that name none
        if self._scaler is not None:
            # Else a rank without samples in the first window would not have made its scale by then.
            self._scaler.scale(torch.zeros((), device=self.device))
        with QUIET:
            self._sums = self.lane.pinned((CHECKSUMS,), torch.int64).unbind()
        self._summed = 0

    def add(self, batch: Portion, worker: CurrentWorker, _share: float = 1.0) -> None:  # the only one
        """Forward and backward of this rank's part, in micro-batches; see `Replica.add`."""
        samples = batch.samples
        # By the window, which all ranks count alike: a slow one may have no part of some.
        is_due = not self._has_looked or is_due_at(worker.global_step + 1)
        if self._checks and samples > 1 and is_due:
            self._has_looked = True
            self._check_loss(batch, worker)
        part = self.part or SampleRange(0, samples)
        pieces = part.forwards or self.forwards(batch, samples)
        written = None
        if not self.has_stepped and self.flat.rank == 0 and (pieces > 1 or self._is_part):
            written = Written(self.module)
        with (
            self._groups.taking_part(self.flat.rank, worker.global_step, part.ranks) as group,
            # Its gradients are those of the mean over its samples.
            self._norms.among(group, samples),
        ):
            # By the window, so that a run that goes on from a checkpoint draws as one that did not end.
            if self._seed is not None:
                self.draws = OwnDraws(self._seed, self.flat.rank, worker.global_step)
            for start, stop in cuts(samples, pieces):
                worker.samples = stop - start
                self._compute(batch.rows(start, stop), worker, Factors(worker.samples / samples, samples))
        if not self.has_stepped:
            self._check_first()
        if written is not None:
            written.tell()

    def forwards(self, _batch: Any, samples: int) -> int:  # a part can always be cut
        """See `Replica.forwards`."""
        return max(1, min(samples // self.least, -(-samples // self._size) * self.pieces))

    def leave(self) -> None:
        """Wake ranks that wait for this one in a SyncBatchNorm: it comes no more."""
        self._groups.leave(self.flat.rank)

    def undo(self) -> None:
        """Forget forward and backward of the part; see `Replica.undo`."""
        super().undo()
        self._unnamed = 0.0

    def step(self, _factor: float = 1.0) -> Tensor | None:  # the shares sum to 1
        """The loss of the part; the optimizer steps in `meet`. See `Replica.step`.

        Where losses name weights, it is the mean of loss x weight: the part's own weight may be 0, and the
        record divides by that of all parts.
        """
        self.gradients.weight.add_(self._unnamed)
        self._unnamed = 0.0
        self.loss_weight = self.gradients.weight if self.gradients.is_weighted else None
        return self._take_value()

    def meet(self, outcome: Outcome) -> None:
        """Take the step of the window; the gradients are the mean of all ranks' now.

        All ranks come to the same bits: they have the same parameters, gradients and optimizer state, and
        a NaN or inf in one rank's gradient is in the mean.

        Streams:
            As `Replica.step`.
        """
        touched = self.gradients.settle([member for member in outcome.members if outcome.samples[member]])
        self._launch_step(self._step_together, touched)
        if self.average is not None:
            self.average.update()

    def _step_together(self, touched: Sequence[bool]) -> None:
        if self._flat_optimizer is None:
            self.gradients.show(touched)
            self._optimize(self._optimizer)
        else:
            self._optimize(self._flat_optimizer.prepare(touched))
            self._flat_optimizer.finish()
        self.gradients.clear()

    def checksum(self) -> Callable[[], int]:
        """Sum the bits of the parameters; returns a function that reads the sum when it is there."""
        at = self._sums[self._summed % CHECKSUMS]
        self._summed += 1
        at.copy_(self.flat.checksum(), non_blocking=True)
        return lambda: int(at)

    def _check_loss(self, batch: Portion, worker: CurrentWorker) -> None:
        samples = min(batch.samples, max(2, self._size))
        starts = (min(start, batch.samples - samples) for start in range(0, batch.samples, samples))
        # A mean that leaves labels out differs from one over samples only where there are such labels.
        at = next((start for start in starts if _ignores(batch.rows(start, start + samples))), None)
        if at is None and self.flat.rank:
            return  # the first rank looks at any other
        begin = at or 0

        def rows(start: int, stop: int) -> Any:
            worker.samples = stop - start
            return batch.rows(begin + start, begin + stop)

        sink, worker.sink = worker.sink, lambda *_: None  # it is no step, and records nothing
        try:
            self._checks = check_mean(self.module, self._under_autocast, rows, samples, self.device)
        finally:
            worker.sink = sink

    def _under_autocast(self, module: nn.Module, batch: Any) -> Any:
        with self.casting():
            # As written: in a trial dynamo would take it for one that cannot be compiled.
            return as_written(self.function)(module, batch)

    def _open_gradients(self) -> SharedGradients:
        return SharedGradients(self.flat, self.module, self._touched)

    def compute(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed:
        """See `Replica.compute`."""
        self._named = None
        with nullcontext() if self.draws is None else self.draws:
            return super().compute(batch, worker, factors)

    def weigh(self, loss: Tensor, share: float | Tensor, of: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss times its weight, by sample of the part; see `Replica.weigh`."""
        named, self._named = self._named, None
        if named is None:
            return super().weigh(loss, share, of)
        weight = torch.as_tensor(named, dtype=torch.float64, device=self.device).detach()
        if weight.numel() != 1:
            raise ValueError(f"the weight of the loss must be one number, not of shape {tuple(weight.shape)}")
        weight = weight.reshape(()) / of
        # The mean over nothing is NaN, and would stay so times 0.
        return torch.where(weight > 0, loss, 0.0) * weight, weight

    def count(self, computed: Computed, factors: Factors) -> None:
        """See `Replica.count`."""
        super().count(computed, factors)
        if computed.weight is None:
            self._unnamed += factors.share
        else:
            self.gradients.is_weighted = True
            self.gradients.weight.add_(computed.weight)

    def _check_gradients(self) -> None:
        if not self.gradients.is_touched:
            raise ValueError(NOT_OURS)

    def _unpack(self, result: object, worker: CurrentWorker) -> Tensor:
        if isinstance(result, Mapping) and "weight" in result:
            self._named = result["weight"]
            result = {name: value for name, value in result.items() if name != "weight"}
        return super()._unpack(result, worker)


def _ignores(batch: Any) -> bool:
    """Whether a label of the batch is the one that losses leave out."""
    return any(bool((leaf == IGNORED).any()) for leaf in tensors_of(batch) if leaf.dtype in LABELS)
