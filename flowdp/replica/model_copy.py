"""Copies of a module: one for each device, and some that a check throws away.

`copy.deepcopy` takes a function for an atom. A hook or a replaced method that is a closure over the module
would work on the original when a copy calls it, without an error. So it is refused; bound methods are copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from flowdp.device.compiled import compile_alike
from flowdp.device.trees import tensors_of
from flowdp.policy.formats import format_error
from flowdp.replica.optimizer_copy import leaves

__all__ = ["CopyError", "copy_module"]


class CopyError(Exception):
    """A module cannot be copied; the reason, for a message."""


def copy_module(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module on a device, without gradients.

    Attributes of parameters are copied, which `copy.deepcopy` leaves out, and parts that were compiled by
    `module.compile()` are compiled again.

    Raises:
        CopyError: A part of it cannot be copied, or a function in the copy holds a part of the original.
    """
    # Each forward sets these anew, from parameters that are copied.
    anew = {id(tensor): tensor.detach().clone() for tensor in _reparametrized(module)}
    memo: dict[int, Any] = dict(anew)
    try:
        made = copy.deepcopy(module, memo)
        for mine, theirs in zip(module.parameters(), made.parameters(), strict=True):
            vars(theirs).update(copy.deepcopy(vars(mine), memo))
        compile_alike(module, made)
    except Exception as error:
        for name, value in _attributes(module):  # torch's own message speaks of weight_norm in any case
            if any(tensor.grad_fn is not None and id(tensor) not in anew for tensor in tensors_of(value)):
                reason = f"its attribute {name!r} holds a tensor with a graph: detach it, or set it to None"
                raise CopyError(reason) from error
        raise CopyError(format_error(error)) from error
    originals = {id(part) for part in (*module.modules(), *module.parameters())}
    for name, value in _attributes(made):
        if _reaches(value, originals):
            raise CopyError(
                f"a function in its attribute {name!r} holds a part of the model, and would use that one in "
                "place of the copy's"
            )
    made.zero_grad(set_to_none=True)
    return made.to(device)


def _reparametrized(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that pruning and torch's old weight_norm and spectral_norm set before each forward."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and {f"{name}_orig", f"{name}_g"} & part._parameters.keys():
                yield value


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module and of its parts, with their names."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            yield f"{prefix}.{name}" if prefix else name, value


def _reaches(value: Any, wanted: set[int]) -> bool:
    """Whether a function or reference in a value holds one of these objects; globals are not looked at."""
    todo, seen = [*leaves(value)], set[int]()
    while todo:
        one = todo.pop()
        one = one() if type(one) is ReferenceType else one
        if id(getattr(one, "__self__", one)) in wanted:
            return True
        function = getattr(one, "__func__", one)
        if isinstance(function, FunctionType) and id(function) not in seen:
            seen.add(id(function))
            todo += leaves(function.__defaults__)
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # empty
                    todo += leaves(cell.cell_contents)
    return False
