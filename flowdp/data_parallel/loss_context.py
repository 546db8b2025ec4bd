"""Processing of each batch of a window: the model's inputs, captured submodules, and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowdp.device.trees import field_names, field_of
from flowdp.errors import FlowdpError, OptionError

__all__ = [
    "BatchPlan",
    "Inputs",
    "InputsOption",
    "LossContext",
    "LossFunction",
    "Results",
    "Traces",
    "check_tags",
    "last_outputs",
]

Traces = dict[str, list[Any]]
"""Outputs of submodules: name -> one entry for each call."""


@dataclass(frozen=True, slots=True)
class LossContext:
    """Argument of a loss function of `setup` for each batch; everything with its graph.

    Attributes:
        output: Return value of the module.
        batch: The whole batch, on the module's device.
        tags: Outputs of the submodules named in `tags`, by name: of their last call.
        traces: The same for all their calls in this forward, in order.
    """

    output: Any
    batch: Any
    tags: Mapping[str, Any]
    traces: Mapping[str, Sequence[Any]]


LossFunction = Callable[[LossContext], Tensor]
InputsOption = str | int | Sequence[str | int] | Callable[[Any], Any] | None


class Inputs:
    """Fields of a batch that the module is called with; the others are targets.

    Args:
        fields: Keys of a mapping, attributes of a dataclass or positions of a sequence, in the order of the
            module's arguments, or one of them; or a function of the batch that returns the arguments. None: a
            tensor goes whole, the first field of a sequence, and of others the fields that are named like
            parameters of `forward`.
        module: The model.

    Raises:
        OptionError: They name nothing.
    """

    def __init__(self, fields: InputsOption, module: nn.Module) -> None:
        named = [fields] if isinstance(fields, str | int) else fields
        if named is not None and not callable(named):
            is_known = isinstance(named, Sequence) and all(isinstance(field, str | int) for field in named)
            if not is_known or not named:
                raise OptionError(
                    "inputs must be keys (str) or positions (int) of a batch, at least one, or a function of "
                    f"it, not {fields!r}"
                )
        self._fields = named
        self._parameters = list(inspect.signature(module.forward).parameters)

    def of(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments, by position and by name."""
        if callable(self._fields):
            made = self._fields(batch)
            return (made if isinstance(made, tuple) else (made,)), {}
        if self._fields is not None:
            return tuple(field_of(batch, field) for field in self._fields), {}
        there = field_names(batch)
        if isinstance(batch, tuple | list) or not there:
            return (batch[0] if there else batch,), {}
        return (), {field: field_of(batch, field) for field in self._parameters if field in there}


def check_tags(tags: object) -> tuple[str, ...]:
    """The names of submodules; one may be given as it is.

    Raises:
        OptionError: They are no names.
    """
    if not isinstance(tags, Sequence):
        raise OptionError(f"tags must be a sequence of names of submodules, not {tags!r}; none is ()")
    return (tags,) if isinstance(tags, str) else tuple(tags)


class Results(NamedTuple):
    """Loss and outputs of a batch.

    Attributes:
        loss: Mean over the batch. Shape []. None without a loss function.
        output: Return value of the module.
        traces: Return values of the tagged submodules, call by call.
    """

    loss: Tensor | None
    output: Any
    traces: Traces


def last_outputs(traces: Traces) -> dict[str, Any]:
    """The return values of the tagged submodules in their last calls."""
    return {name: calls[-1] for name, calls in traces.items() if calls}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Processing of each batch of a window.

    Attributes:
        inputs: Fields of the batch that the module takes.
        tags: Names of submodules whose outputs are captured.
        loss: The loss function; None: the caller computes a loss on the output.
    """

    inputs: Inputs
    tags: tuple[str, ...] = ()
    loss: LossFunction | None = None

    def results(self, module: nn.Module, batch: Any) -> Results:
        """Forward of a module, and the loss, with their graph.

        Raises:
            FlowdpError: The loss is not one number, or depends on no parameter.
        """
        traces: Traces = {name: [] for name in self.tags}
        args, kwargs = self.inputs.of(batch)
        with ExitStack() as stack:
            for name, calls in traces.items():
                note = partial(lambda calls, _module, _args, output: calls.append(output), calls)
                stack.callback(module.get_submodule(name).register_forward_hook(note).remove)
            output = module(*args, **kwargs)
        if self.loss is None:
            return Results(None, output, traces)
        loss = self.loss(LossContext(output, batch, last_outputs(traces), traces))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            form = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise FlowdpError(
                f"the loss function must return one number, the mean over the batch, not {form}"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise FlowdpError("the loss depends on no parameter of the model: compute it from the context")
        return Results(loss.squeeze(), output, traces)
