"""Copies of a module, each with functions of its own: hooks and closures that hold parts of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from flowdp.data.trees import tensors_of
from flowdp.device.accelerator import is_accelerator
from flowdp.device.compiled import compile_alike
from flowdp.device.seeding import generators_kept
from flowdp.device.streams import Lane
from flowdp.errors import OptionError
from flowdp.modules.hooks import Twins, twins_of
from flowdp.policy.formats import format_error

__all__ = ["CopyError", "ReplicaFactory", "copy_module", "make_replica"]

ReplicaFactory = Callable[[torch.device], nn.Module]


class CopyError(Exception):
    """A module cannot be copied; the reason, for a message."""


def copy_module(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module on a device, without gradients.

    Functions that hold the module or a part of it, as hooks do that are closures, hold the copy's parts
    there. Attributes of parameters are copied, which `copy.deepcopy` leaves out, and parts that were compiled
    by `module.compile()` are compiled again.

    Raises:
        CopyError: A part of it cannot be copied.
    """
    # Each forward sets these anew, from parameters that are copied.
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _reparametrized(module)}
    try:
        made = copy.deepcopy(module, memo)
        for mine, theirs in zip(module.parameters(), made.parameters(), strict=True):
            vars(theirs).update(copy.deepcopy(vars(mine), memo))
    except Exception as error:
        raise CopyError(_reason(module, error)) from error
    made.zero_grad(set_to_none=True)
    made = made.to(device)
    try:
        compile_alike(module, made)
    except ValueError as error:
        raise CopyError(format_error(error)) from error
    memo.pop(id(memo), None)  # where deepcopy keeps the originals alive
    Twins(memo | twins_of(module.modules(), made.modules())).rebind(memo.values())
    return made


def _reparametrized(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that pruning and torch's old weight_norm and spectral_norm set before each forward."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, (BasePruningMethod, WeightNorm, SpectralNorm)):
                name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
                tensor = vars(part).get(name)
                if isinstance(tensor, Tensor):
                    yield tensor


def _reason(module: nn.Module, error: Exception) -> str:
    """The reason why a module cannot be copied: torch's own speaks of weight_norm in any case."""
    known = {id(tensor) for tensor in _reparametrized(module)}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if any(one.grad_fn is not None and id(one) not in known for one in tensors_of(value)):
                shown = repr(f"{name}.{key}" if name else key)
                return f"its attribute {shown} holds a tensor with a graph: detach it, or set it to None"
    return format_error(error)


def make_replica(module: nn.Module, factory: ReplicaFactory | None, lane: Lane) -> nn.Module:
    """The module of another device, by the user's factory, or as a copy.

    The draws of a factory leave no trace.

    Raises:
        OptionError: The module cannot be copied, or the factory makes none.
    """
    lane.await_caller()
    with lane.on(lane.compute):
        if factory is not None:
            # A factory draws the weights of its module, and a script without it does not.
            with generators_kept([lane.device] if is_accelerator(lane.device) else []):
                made = factory(lane.device)
            if not isinstance(made, nn.Module) or made is module:
                raise OptionError(
                    f"replica({str(lane.device)!r}) must build a new module, not return {made!r:.80}"
                )
            made = made.to(lane.device)
        else:
            try:
                made = copy_module(module, lane.device)
            except CopyError as error:
                raise OptionError(
                    f"the model cannot be copied for {lane.device} ({error}); give a factory: "
                    f"replica=lambda device: MyModel(...)"
                ) from error.__cause__
    lane.drain()
    return made
