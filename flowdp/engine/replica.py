"""One model, its optimizer and its loss on one device: what a step is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.device.streams import Lane
from flowdp.device.tensors import FlatReplica
from flowdp.engine.context import CurrentWorker
from flowdp.engine.learning_rate import LearningRate
from flowdp.options import Precision

__all__ = ["LossOption", "Replica", "loss_function"]

LossOption = Callable[..., Any] | nn.Module
Loss = Callable[[nn.Module, Any], Any]

NOT_OURS = "the loss does not depend on a parameter of the replica: use the model that is passed in"


def loss_function(loss: LossOption, device: torch.device) -> Loss:
    """The loss as a function of (module, batch); a criterion is copied to the device."""
    if not isinstance(loss, nn.Module):
        return loss
    criterion = copy.deepcopy(loss).to(device)

    def apply(model: nn.Module, batch: Any) -> Any:
        # Not by trying: a tensor of two samples can be taken apart, too.
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"a criterion is called as criterion(model(x), y) and needs batches of two parts, not "
                f"{type(batch).__name__}; give a function instead: loss=lambda model, batch: ..."
            )
        inputs, target = batch
        return criterion(model(inputs), target)

    return apply


class Replica:
    """The trained things of one rank.

    Args:
        module: On its device, flattened.
        flat: Its memory.
        optimizer: Of its parameters.
        loss: Function of (module, batch).
        learning_rate: Sets the optimizer's rates.
        lane: Of the device where all of it lies.
        precision: "bf16" and "fp16" run forward and loss under autocast, "fp16" with a scaled loss.
        max_grad_norm: Gradients are clipped to this 2-norm between backward and step; None: not.

    Threads:
        The worker of this rank, once it runs.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: FlatReplica,
        optimizer: Optimizer,
        loss: Loss,
        learning_rate: LearningRate,
        lane: Lane,
        precision: Precision = "32",
        max_grad_norm: float | None = None,
    ) -> None:
        self.module = module
        self.flat = flat
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.lane = lane
        self.device = lane.device
        self._loss = loss
        self._autocast = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._scaler = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        self._max_grad_norm = max_grad_norm
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._has_stepped = False

    def step(self, batch: Any, worker: CurrentWorker) -> Tensor:
        """Forward, backward, clip, optimizer step.

        Returns:
            The loss of the batch, before the step, on the device. Shape [].

        Raises:
            TypeError: What the loss returned is not a loss.
            ValueError: The loss is not a scalar.

        Streams:
            All of it is enqueued on the current stream, which is the lane's `compute`. Nothing is read back,
            but for the optimizers that a gradient scaler has to ask (all that are not fused).
        """
        if self._autocast is None:
            result = self._loss(self.module, batch)
        else:
            # Autocast is a state of the thread: it is entered where the step runs, and per step.
            with torch.autocast(self.device.type, dtype=self._autocast):
                result = self._loss(self.module, batch)
        loss = result if isinstance(result, Tensor) else self._unpack(result, worker)
        if loss.dim() != 0:
            if loss.numel() != 1:
                raise ValueError(
                    f"the loss must be a scalar, the mean over the batch, not a tensor of shape "
                    f"{tuple(loss.shape)}; add .mean()"
                )
            loss = loss.squeeze()
        if not loss.requires_grad:
            raise ValueError(NOT_OURS)
        if self._scaler is None:
            loss.backward()
        else:
            self._scaler.scale(loss).backward()
        if not self._has_stepped:
            self._check_gradients()
        if self._scaler is None:
            self._clip()
            self.optimizer.step()
        else:
            self._scaled_step(self._scaler)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _clip(self) -> None:
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """Step, unless a gradient overflowed; the scale follows."""
        if self._max_grad_norm is not None:
            scaler.unscale_(self.optimizer)
            self._clip()
        scaler.step(self.optimizer)
        scaler.update()

    def _check_gradients(self) -> None:
        """Once: a loss that was computed on another model, the user's own, would train nothing, silently."""
        if all(parameter.grad is None for parameter in self._trained):
            raise ValueError(NOT_OURS)
        self._has_stepped = True

    @staticmethod
    def _unpack(result: object, worker: CurrentWorker) -> Tensor:
        scalars: object = {}
        loss: object = result
        if isinstance(result, Mapping):
            scalars = {name: value for name, value in result.items() if name != "loss"}
            loss = result.get("loss")
        elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            loss, scalars = result
        if not isinstance(loss, Tensor) or not isinstance(scalars, Mapping):
            raise TypeError(
                f"the loss must return a scalar tensor, (loss, scalars) or a mapping with 'loss', not "
                f"{_describe(result)}"
            )
        for name, value in scalars.items():
            worker.record(name, value)
        return loss


def _describe(result: object) -> str:
    if isinstance(result, Mapping):
        return f"a mapping with {', '.join(map(repr, result)) or 'nothing'}"
    return type(result).__name__
