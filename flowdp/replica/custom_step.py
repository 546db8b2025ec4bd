"""The user's own step: several losses and optimizers, as in a GAN or in reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowdp.device.gathered import made
from flowdp.device.worker_context import CurrentWorker, Steps
from flowdp.graphs.base import Computed
from flowdp.replica.factories import all_of
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.replica import Replica

__all__ = ["CustomStepReplica", "TrainStep"]

TrainStep = Callable[[CurrentWorker, Any], Mapping[str, Any] | None]


class CustomStepReplica(Replica):
    """Replica with the user's `train_step(worker, batch)`: one call is one step.

    All gradients are cleared when a call returns, for a loss leaves gradients at parameters that are not
    stepped by it. In "fp16" the optimizers share one gradient scaler, which is updated after their
    steps: before the next backward and at the end of the call.

    Args:
        parts: Objects and settings of this rank.
        train_step: Function of (worker, batch), the user's.
    """

    may_be_flat = False
    can_repeat = False

    def __init__(self, parts: ReplicaParts, train_step: TrainStep) -> None:
        super().__init__(parts, train_step)
        self._has_scaled = False  # an optimizer has asked the scaler since its last update

    @property
    def steps(self) -> Steps:
        """This replica."""
        return self

    def add(self, batch: Any, worker: CurrentWorker, _share: float = 1.0) -> None:  # the only one
        """Call the user's step; see `Replica.add`.

        Raises:
            TypeError: It returned something else than a mapping of numbers or None.
            ValueError: The value under "loss" is not a scalar.
        """
        with self.launching or nullcontext(), self.casting():
            result = self.function(worker, made(batch))
        if not self.has_stepped:
            self._check_first()
        if result is None:
            return
        if not isinstance(result, Mapping):
            raise TypeError(
                f"train_step must return a mapping of scalars or None, not {type(result).__name__}"
            )
        for name, value in result.items():
            if name != "loss":
                worker.record(name, value)
        if "loss" in result:
            self.loss.add(Computed(self._scalar(result["loss"])), 1.0)

    def step(self, _factor: float | Tensor = 1.0) -> Tensor | None:  # there is nothing to scale
        """Clear the gradients that the call has left; see `Replica.step`."""
        self._update_scale()
        self.module.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return self.loss.take()[0]

    def backward(self, loss: Tensor, **options: Any) -> None:
        """See `CurrentWorker.backward`."""
        # As torch advises: backward runs in the types that forward has chosen.
        with torch.autocast(self.device.type, enabled=False):
            if self._has_scaled and all(parameter.grad is None for parameter in self.trained):
                self._update_scale()  # else the gradients there would be of another scale
            self._differentiate(self.scale(loss), **options)

    def _differentiate(self, loss: Tensor, **options: Any) -> None:
        if self.launching is None:
            super()._differentiate(loss, **options)
            return
        self.launching.release()  # backward needs no interpreter lock
        try:
            super()._differentiate(loss, **options)
        finally:
            self.launching.acquire()

    def optimize(self, optimizer: Optimizer) -> None:
        """See `CurrentWorker.step`."""
        if not any(optimizer is own for own in all_of(self.optimizers)):
            raise ValueError(
                "worker.step takes one of worker.optimizers: the replica's own, not the one given"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.autocast(self.device.type, enabled=False):
            self.update.optimize(optimizer, parameters)
        self._has_scaled = self.update.scaler is not None
        optimizer.zero_grad(set_to_none=True)

    def _check_gradients(self) -> None:
        """Check nothing: a call may step some optimizers only, and has cleared their gradients."""

    def _update_scale(self) -> None:
        if self._has_scaled and self.update.scaler is not None:
            self.update.scaler.update()
            self._has_scaled = False

    def _scalar(self, loss: object) -> Tensor:
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))  # type: ignore[arg-type]
        if value.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not a tensor of shape {tuple(value.shape)}")
        return value.reshape(())
