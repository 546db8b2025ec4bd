"""The replica of policy="exact" on several devices: its optimizer steps by the mean gradient of all.

The gradient that a rank brings is the mean over the samples of its part (`WindowReplica`), so the mean of
the ranks' gradients, weighted by their samples, is that of the whole window. Weights that losses name are
averaged with the gradients, which are divided by them. Who steps which parameters, `JointStep` and `SpanStep`
say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from flowdp.collective.batch_norm import RankGroups, SharedStatistics
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import QUIET
from flowdp.protocol.messages import Checksum, Outcome, SampleRange
from flowdp.replica.factories import each_of
from flowdp.replica.flat_optimizer import FlatOptimizer, refuse_state
from flowdp.replica.loss import Loss
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.replica import Replica
from flowdp.replica.window_replica import WindowReplica

__all__ = ["ExactReplica"]

CHECKSUMS = 8
"""Checksums that may be on their way to the host: more than rounds can be under way on a device."""


class ExactReplica(WindowReplica):
    """Replica whose optimizer steps by the mean gradient of all ranks.

    Attributes:
        owner: The replica that steps all parameters, for all ranks; None: there is none.
        whole_state: Method for the `state_dict()` of the optimizer, where the ranks have parts of its state.

    Args:
        parts: Objects and settings of this rank.
        loss: Loss of (module, batch).
        size: Samples of a micro-batch, at most.
        groups: Groups of the ranks that have a part of a window, for SyncBatchNorm.
        seed: Seed of this rank's reproducible draws; None: torch's own generator.
        checks: Whether the loss is checked, in the windows 1, 2, 4, 8, ... (by the first rank, and by others
            that have a label which losses leave out); see `check_mean`.
    """

    gradients: SharedGradients
    steps_at_gate = True
    whole_state: WeakMethod[Callable[[], dict[str, Any]]] | None = None
    _owner: Callable[[], ExactReplica | None] | None = None  # weak

    def __init__(
        self,
        parts: ReplicaParts,
        loss: Loss,
        *,
        size: int,
        groups: RankGroups,
        seed: int | None = None,
        checks: bool = False,
    ) -> None:
        super().__init__(parts, loss, size=size, seed=seed, checks=checks)
        self._groups = groups
        self._norms = SharedStatistics(self.module)
        # A step that ran out of memory on one rank cannot be repeated without the others.
        self.can_repeat = not self.meets
        self._left_out = False  # a step since the last meeting, for its gradient is not finite
        # Else a rank without samples in the first window would not have made its scale by then.
        self.scale(torch.zeros((), device=self.device))
        with QUIET:
            self._sums = self.lane.pinned((CHECKSUMS,), torch.int64).unbind()
        self._summed = 0

    @property
    def averaged(self) -> FlatTensors:
        """See `Replica.averaged`."""
        return self.gradients

    @property
    def watched(self) -> FlatTensors | None:
        """See `Replica.watched`."""
        # An overflow of a scaled loss is the scaler's: it finds it in the mean, and leaves the step out.
        return self.gradients if self.update.scaler is None else None

    @property
    def meets(self) -> bool:
        """See `Replica.meets`."""
        return bool(self._norms)

    def is_finite(self) -> bool:
        """See `Replica.is_finite`; a step alone has left out what is not."""
        return not self._left_out and super().is_finite()

    @contextmanager
    def _beside_others(self, part: SampleRange, samples: int) -> Iterator[None]:
        # Its gradients are those of the mean over its samples.
        with self._norms.among(self._groups.of(self.flat.rank, part.ranks), samples):
            yield

    def leave(self) -> None:
        """Wake ranks that wait for this one in a SyncBatchNorm: it comes no more."""
        self._groups.leave(self.flat.rank)

    def step(self, _factor: float | Tensor = 1.0) -> Tensor | None:  # the shares sum to 1
        """The loss of the part; the optimizer steps in `meet`. See `Replica.step`."""
        gradients = self.gradients
        value, named, unnamed = self.loss.take()
        gradients.weight.add_(unnamed)
        if named is None:
            self.loss.step_weight = None
            return value
        gradients.is_weighted = True
        weight = self.loss.step_weight = gradients.weight.add_(named)
        return None if value is None else value / torch.where(weight == 0, 1.0, weight)

    def step_alone(self) -> Tensor | None:
        """Step the optimizer by this rank's gradients, of a whole window; returns the loss as `step` does.

        A step whose gradient is not finite is left out, with what its forwards have written to buffers: no
        other rank has an optimizer to go on with.

        Streams:
            As `Replica.step`. The host waits for the gradients.
        """
        loss = self.step()
        weight = self.loss.step_weight
        self.loss.step_weight = None if weight is None else weight.clone()  # the gradients' own is cleared
        gradients = self.gradients
        touched = gradients.collect()
        gradients.divide(is_weighted=gradients.is_weighted)
        if self.update.scaler is None and not gradients.is_finite():
            self._left_out = True
            gradients.clear()
            if self.flat.has_buffers:
                self.flat.put_back_buffers()
        else:
            self._step(touched)
            if self.average is not None:
                self.average.update()
        return loss

    def end_alone(self) -> None:
        """Note that a round of steps alone is over: a step that was left out has been told of."""
        self._left_out = False

    def meet(self, outcome: Outcome) -> None:
        """Step the parameters that this rank owns; the gradients are the mean of all ranks' now.

        A device leaves its gradient out of the mean where that is not finite; where every rank's is not, the
        step writes NaN, and the run ends before anything reads the parameters (`NanGuard.decide`).

        Streams:
            As `Replica.step`.
        """
        assert outcome.window is not None
        self._step(self.gradients.settle(outcome.window.touched))

    def _step(self, touched: Sequence[bool]) -> None:
        update = self.update
        if self.owner in (None, self):
            if update.flat is not None:
                captured = self.captured
                update.step_flat(touched, replays=captured is not None and captured.is_running)
                self.flat.refresh()
                return
            self.gradients.show(touched)
            update.take(update.optimizer)
            self.flat.refresh()
        self.gradients.clear()

    # ------------------------------------------------------------------ spans
    @property
    def can_have_span(self) -> bool:
        """Whether it can step a part of the flat memory alone, whatever parameters lie there."""
        # An overflow of a scaled loss is found in all gradients.
        return (
            self.lane.is_async
            and all(flat.spans > 1 for flat in self.flat.flats)
            and self.update.scaler is None
            and self.update.flat is not None
            and self.update.flat.unfit() is None
        )

    def own_span(self) -> FlatOptimizer:
        """Step the rank's span of the flat memory alone; returns what has the state of that.

        Threads:
            The one that builds, before the workers run.
        """
        flat = self.update.flat
        assert flat is not None
        self.lane.drain()
        with self.lane.on(self.lane.comm):
            self.gradients.own_span()
            flat.own_span(self.flat.rank)
        self.lane.drain()
        return flat

    # ------------------------------------------------------------------ another one steps
    @property
    def owner(self) -> ExactReplica | None:
        """See the class."""
        return None if self._owner is None else self._owner()

    def follow(self, owner: ExactReplica) -> None:
        """Let another replica step the parameters; the state of this one's optimizer is dropped.

        Threads:
            The one that builds, before the workers run.
        """
        self._owner = ref(owner)
        if owner is not self:
            optimizer = self.update.optimizer
            optimizer.state.clear()
            optimizer.register_state_dict_pre_hook(refuse_state)
            # Torch's schedulers would warn that it has not stepped.
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def received(self) -> None:
        """Tell module and autograd of parameters that the owner has written to the flat memory."""
        self.flat.scatter()
        # By its version autograd sees that a parameter has changed since a forward used it.
        torch.autograd.graph.increment_version(self.gradients.parameters)
        if (owner := self.owner) is not None:
            self.update.copy_scale(owner.update)

    def copy_from(self, donor: Replica) -> None:
        """See `Replica.copy_from`; the state of the optimizer stays with the owner of the parameters."""
        if self.owner is None:
            super().copy_from(donor)
            return
        for mine, theirs in zip(self.flat.memories, donor.flat.memories, strict=True):
            mine.copy_(theirs)
        if self.average is not None and donor.average is not None:
            self.average.copy_from(donor.average)
        self.received()
        self.gradients.clear()

    def optimizer_states(self) -> Any:
        """See `Replica.optimizer_states`; the state is that of all owners."""
        if (owner := self.owner) is not None and owner is not self:
            return owner.optimizer_states()
        whole = None if self.whole_state is None else self.whole_state()
        return super().optimizer_states() if whole is None else each_of(self.optimizers, lambda _: whole())

    def checksum(self) -> Callable[[], Checksum]:
        """Sum the bits of the parameters; returns a function that reads the sum when it is there."""
        at = self._sums[self._summed % CHECKSUMS]
        self._summed += 1
        at.copy_(self.flat.checksum(), non_blocking=True)
        kind = (self.owner or self).lane.kind
        return lambda: Checksum(kind, int(at))

    def _open_gradients(self, _is_flat: bool) -> SharedGradients:
        return SharedGradients(self.flat)

    @property
    def touched(self) -> bytes:
        """See `SharedGradients`."""
        return self.gradients.touched
