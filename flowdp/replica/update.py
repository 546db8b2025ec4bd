"""The update of a replica's parameters: gradients are clipped, the optimizer steps, their average follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.device.flat_gradients import FlatGradients
from flowdp.device.streams import StreamLane
from flowdp.device.weight_average import WeightAverage
from flowdp.replica.captured_update import CapturedUpdate
from flowdp.replica.factories import all_of
from flowdp.replica.flat_optimizer import FlatOptimizer
from flowdp.replica.parts import ReplicaParts

__all__ = ["Update"]


class Update:
    """Clips the gradients of a replica and steps its optimizer: flat memory, or parameter by parameter.

    Args:
        parts: Objects and settings of the replica.
        gradients: See below.
        average: Moving average that follows each step; None: none does.
        is_flat: Whether the optimizer steps the flat memory; see `flat_optimizer.obstacle`.

    Attributes:
        optimizer: The only optimizer, or the first one.
        gradients: Gradients as flat memory; None where each parameter has its own, or none.
        flat: Steps the flat memory in the optimizer's name; None where each parameter is stepped by itself.
        scaler: Scales the losses of "fp16", and leaves out steps whose gradients overflow; None elsewhere.
        trained: The parameters that the optimizer steps.
        clips_norm: Whether the gradients are clipped by their norm.

    Threads:
        The owner of the replica.

    Streams:
        All is enqueued on the current one, the lane's `compute`; but optimizers that a gradient scaler has to
        ask (all not fused) are waited for.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        gradients: FlatGradients | None,
        average: WeightAverage | None,
        *,
        is_flat: bool,
    ) -> None:
        self.optimizer = all_of(parts.optimizers)[0]
        self.gradients = gradients
        self.flat: FlatOptimizer | None = None
        if is_flat and gradients is not None:
            self.flat = FlatOptimizer(self.optimizer, parts.flat, gradients)
        self.scaler = torch.amp.GradScaler(parts.lane.device.type) if parts.precision == "fp16" else None
        self.trained = [parameter for parameter in parts.module.parameters() if parameter.requires_grad]
        self.clips_norm = parts.max_grad_norm is not None
        self._trainable = [*self.trained, *parts.flat.thawable]
        self._average = average
        self._max_norm, self._max_value = parts.max_grad_norm, parts.max_grad_value
        self._norms: list[Tensor] = []  # of the gradients, before they were clipped
        self._captured: CapturedUpdate | None = None
        if parts.capture is not None and self.flat is not None and self.scaler is None:
            assert isinstance(parts.lane, StreamLane)
            self._captured = CapturedUpdate(self.flat, parts.lane, self._recorded)

    def step(self, factor: float | Tensor, *, replays: bool) -> None:
        """Step by the gradients of the micro-batches, and begin another sum of them.

        Args:
            factor: On the gradients.
            replays: Whether the step may run as a graph: forward and backward have.
        """
        gradients = self.gradients
        is_scaled = isinstance(factor, Tensor) or factor != 1.0  # a tensor is not read back
        if self.flat is not None and gradients is not None:
            touched = gradients.collect()
            if is_scaled:
                gradients.scale(factor)
            self.step_flat(touched, replays=replays)
            return
        if is_scaled:
            torch._foreach_mul_([p.grad for p in self._trainable if p.grad is not None], factor)
        self.take(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.clear()  # of parameters, too, that it does not have: the next norm is of the next gradients

    def step_flat(self, touched: Sequence[bool], *, replays: bool) -> None:
        """Step the flat memory by the gradients there, and begin another sum; captured behind a graph.

        Args:
            touched: Flag per parameter: it has a gradient.
            replays: As of `step`.
        """
        assert self.flat is not None
        assert self.gradients is not None
        if replays and self._captured is not None:
            norms = self._captured.run(touched)
            if norms is not None:
                self._norms += norms
                self.gradients.forget()
                return
        self.take(self.flat.prepare(touched))
        self.flat.finish()
        self.gradients.clear()

    def step_span(self, touched: Sequence[bool]) -> None:
        """Step the rank's span of the flat memory; arguments as of `step_flat`."""
        assert self.flat is not None
        self.optimize(self.flat.prepare(touched), self._trainable)
        self.flat.finish()

    def take(self, optimizer: Optimizer) -> None:
        """Clip all gradients and step; in "fp16" the scale follows, and so does the moving average."""
        self.optimize(optimizer, self._trainable)
        if self.scaler is not None:
            self.scaler.update()
        if self._average is not None:
            self._average.update()

    def optimize(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of these parameters and step; in "fp16" unless one overflowed."""
        scaler = self.scaler
        if self._max_norm is not None or self._max_value is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            self._clip(parameters)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def take_norms(self) -> Sequence[Tensor]:
        """The 2-norms of the gradients that were clipped since the last call, before that. Shape [] each."""
        if not self._norms:
            return ()
        norms, self._norms = self._norms, []
        return norms

    def clear(self) -> None:
        """Forget all gradients."""
        if self.gradients is None:
            for parameter in self._trainable:
                parameter.grad = None
            return
        self.gradients.clear()

    def copy_scale(self, other: Update) -> None:
        """Scale losses as another replica does from here on."""
        if self.scaler is not None and other.scaler is not None:
            self.scaler.load_state_dict(other.scaler.state_dict())

    def close(self) -> None:
        """Free its graph; there are no more steps."""
        self._captured = None

    def _recorded(self, optimizer: Optimizer) -> list[Tensor]:
        """Take a step that is recorded; returns the norms."""
        before, self._norms = self._norms, []
        try:
            self.take(optimizer)
            return self._norms
        finally:
            self._norms = before

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of these parameters: by value or by norm, which is kept."""
        gradients = self.gradients
        if self._max_value is not None:
            if gradients is None:
                nn.utils.clip_grad_value_(parameters, self._max_value)
            else:
                gradients.clamp(self._max_value)
        if self._max_norm is not None:
            if gradients is None:
                norm = nn.utils.clip_grad_norm_(parameters, self._max_norm)
            else:
                norm = gradients.clip(self._max_norm)
            self._norms.append(norm)
