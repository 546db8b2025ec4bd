"""The user's loss: as a function of (module, batch), what it returns, and its sum over a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.graphs.base import Computed

__all__ = [
    "NOT_OURS",
    "Loss",
    "LossOption",
    "RunningLoss",
    "loss_function",
    "of_model_and_batch",
    "unpack_loss",
]

LossOption = Callable[..., Any] | nn.Module
Loss = Callable[[nn.Module, Any], Any]

REMEDIES = {
    "NoneType": ": end it with `return loss`",
    "float": ": leave .item() out",
    "tuple": " of something else: return the loss alone, or (loss, {'name': number})",
}
"""Remedies for a return value that is no loss, by the name of its class."""

NOT_OURS = "the loss does not depend on a parameter of the replica: use the model that is passed in"


def loss_function(loss: LossOption, device: torch.device) -> Loss:
    """The loss as a function of (module, batch); a criterion is copied to the device."""
    if not isinstance(loss, nn.Module):
        return loss
    criterion = copy.deepcopy(loss).to(device)

    def apply(model: nn.Module, batch: Any) -> Any:
        # Not by trying: a tensor of two samples can be taken apart, too.
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            needs = "a criterion is called as criterion(model(x), y) and needs batches of two parts"
            if isinstance(batch, Tensor) or (isinstance(batch, (tuple, list)) and len(batch) == 1):
                raise TypeError(f"{needs}, and this batch has no label: give a dataset of (x, y)")
            keys = list(batch) if isinstance(batch, Mapping) else []
            raise TypeError(
                f"{needs}, not {type(batch).__name__}{keys or ''}; give a function instead, with the keys of "
                "the batch: loss=lambda model, batch: criterion(model(batch['x']), batch['y'])"
            )
        inputs, target = batch
        return criterion(model(inputs), target)

    return apply


def of_model_and_batch(loss: object, inputs: str = "batch[0]", target: str = "batch[1]") -> str:
    """Text of the error of a loss that is a function of an output and a target, with the one to write.

    Args:
        loss: As the user gave it.
        inputs: Place of the model's inputs in a batch.
        target: Place of the target.
    """
    function = getattr(loss, "func", loss)  # of a partial
    name = getattr(function, "__name__", type(function).__name__)
    name = f"F.{name}" if getattr(function, "__module__", "") == "torch.nn.functional" else name
    return (
        f"loss must be a function of (model, batch), and {name} seems to be one of an output and a target: "
        f"loss=lambda model, batch: {name}(model({inputs}), {target})"
    )


def unpack_loss(result: object) -> tuple[Tensor, Any, Mapping[str, Any]]:
    """The loss in the return value of the user's function, the weight that it names, and its scalars.

    Raises:
        TypeError: There is no loss.
    """
    if isinstance(result, Tensor):
        return result, None, {}
    loss: object = result
    weight: Any = None
    scalars: object = {}
    if isinstance(result, Mapping):
        scalars = {name: value for name, value in result.items() if name not in ("loss", "weight")}
        loss, weight = result.get("loss"), result.get("weight")
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, scalars = result
    if not isinstance(loss, Tensor) or not isinstance(scalars, Mapping):
        raise TypeError(
            f"the loss must return a scalar tensor, (loss, scalars) or a mapping with 'loss', not "
            f"{_described(result)}"
        )
    return loss, weight, scalars


def _described(result: object) -> str:
    if isinstance(result, Mapping):
        return f"a mapping with {', '.join(map(repr, result)) or 'nothing'}"
    name = type(result).__name__
    return name + REMEDIES.get(name, "")


class RunningLoss:
    """The loss of a step over its micro-batches so far.

    Attributes:
        value: The sum of the micro-batches' losses, times their shares. Shape []. None before the first.
        step_weight: Weight of the last step's loss, per sample, where losses name one. Shape [].

    Threads:
        The owner of the replica.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.step_weight: Tensor | None = None
        self._weight: Tensor | None = None  # of the losses that name one, per sample of the step
        self._unnamed = 0.0  # part of the samples whose losses name none

    def add(self, computed: Computed, share: float) -> None:
        """Add a micro-batch's loss, and the weight that it names."""
        value, weight = computed.loss, computed.weight
        self.value = value if self.value is None else self.value + value
        if weight is None:
            self._unnamed += share
        else:
            self._weight = weight if self._weight is None else self._weight + weight

    def take(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Forget the micro-batches.

        Returns:
            The sum of their losses, of the weights that some name, and the part of the samples of the others.
        """
        sums = self.value, self._weight, self._unnamed
        self.value, self._weight, self._unnamed = None, None, 0.0
        return sums

    def end(self, factor: float | Tensor) -> tuple[Tensor | None, float | Tensor]:
        """End the step.

        Args:
            factor: On the loss, where the shares did not sum to 1.

        Returns:
            The loss over the step's samples, the mean by their weights where losses name some; and the factor
            on the gradients that goes with it.
        """
        value, weight = self.value, self._weight
        self.value = None
        if weight is None:
            self.step_weight = None
        else:
            weight = weight + self._unnamed
            self.step_weight = weight * factor
            # The gradients are those of loss x weight; a mean over nothing has none.
            factor = 1.0 / torch.where(weight == 0, 1.0, weight)
        self._weight, self._unnamed = None, 0.0
        if value is not None and (isinstance(factor, Tensor) or factor != 1.0):  # a tensor is not read back
            value = value * factor
        return value, factor
