"""From what the user gave to one replica per device: models, optimizers and criteria, checked.

Factories run one after another on the calling thread, rank 0 first, so that `torch.manual_seed` before the
start fixes the initial weights. All replicas start from rank 0's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.device.tensors import FlatReplica
from flowdp.errors import OptionError

__all__ = ["ModelOption", "OptimizerOption", "build_models", "build_optimizer", "equal_start"]

ModelOption = nn.Module | Callable[..., nn.Module]
OptimizerOption = Optimizer | Callable[..., Optimizer]


def build_models(model: ModelOption, devices: Sequence[torch.device]) -> list[nn.Module]:
    """One module per device, in training mode.

    Args:
        model: A module, copied for every device and not touched, or a factory: called as `f(device)` if it
            has one required positional parameter, as `f(device=...)` if it names `device`, else as `f()`.
        devices: One per rank.

    Raises:
        OptionError: It is neither, cannot be copied, or returns something else or the same module twice.
    """
    modules: list[nn.Module] = []
    for rank, device in enumerate(devices):
        module = _copy(model) if isinstance(model, nn.Module) else _call_factory(model, device, rank)
        if any(module is other for other in modules):
            raise OptionError(
                f"the model factory returned the same module for rank {rank} and an earlier rank: it must "
                f"build a new one at every call"
            )
        modules.append(module.to(device).train())
    return modules


def equal_start(modules: Sequence[nn.Module]) -> list[FlatReplica]:
    """Flatten the replicas and give all of them rank 0's values, frozen parameters included.

    Raises:
        OptionError: The replicas differ in structure, or nothing in them can be trained.
    """
    if not any(parameter.requires_grad for parameter in modules[0].parameters()):
        raise OptionError("the model has no parameter that requires grad: there is nothing to train")
    replicas = [FlatReplica(module, rank) for rank, module in enumerate(modules)]
    for rank, replica in enumerate(replicas[1:], 1):
        replica.copy_from(replicas[0])
        with torch.no_grad():
            for (name, mine), theirs in zip(_frozen(modules[rank]), _frozen(modules[0]), strict=True):
                if (name, mine.shape) != (theirs[0], theirs[1].shape):
                    raise OptionError(
                        f"the replicas differ: frozen parameter {name!r} of shape {tuple(mine.shape)} on "
                        f"rank {rank} is {theirs[0]!r} of shape {tuple(theirs[1].shape)} on rank 0"
                    )
                mine.copy_(theirs[1])
    return replicas


def build_optimizer(optimizer: OptimizerOption, module: nn.Module, source: nn.Module | None) -> Optimizer:
    """The optimizer of one replica.

    Args:
        optimizer: An instance, rebuilt from its class, groups, defaults and state with the replica's
            parameters in place of the source's; or a factory that gets the parameters that require grad or,
            if it names `model`, the module.
        module: The replica.
        source: The module that an instance was made for.

    Raises:
        OptionError: It is neither, or it optimizes something else.
    """
    if isinstance(optimizer, Optimizer):
        if source is None:
            raise OptionError(
                "an optimizer instance belongs to the parameters of one model: with a model factory, give an "
                "optimizer factory: optimizer=lambda params: ..."
            )
        return _rebuild(optimizer, module, source)
    made: Any
    if "model" in _parameters(optimizer):
        made = optimizer(model=module)
    else:
        made = optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])
    if not isinstance(made, Optimizer):
        raise OptionError(f"the optimizer factory returned {type(made).__name__}, not a torch optimizer")
    own = set(module.parameters())
    if any(parameter not in own for group in made.param_groups for parameter in group["params"]):
        raise OptionError(
            "the optimizer factory used parameters of another model than the replica it was called for: "
            "build it from its argument, optimizer=lambda params: torch.optim.SGD(params, ...)"
        )
    return made


def _copy(model: nn.Module) -> nn.Module:
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise OptionError(
            f"the model cannot be copied for each device ({type(error).__name__}: {error}); give a factory: "
            f"model=lambda: MyModel(...)"
        ) from error
    twin.zero_grad(set_to_none=True)
    return twin


def _call_factory(factory: object, device: torch.device, rank: int) -> nn.Module:
    if not callable(factory):
        raise OptionError(f"model must be a torch.nn.Module or a factory of one, not {factory!r}")
    parameters = _parameters(factory)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        p for p in parameters.values() if p.kind in positional and p.default is inspect.Parameter.empty
    ]
    if len(required) == 1:
        module = factory(device)
    elif "device" in parameters:
        module = factory(device=device)
    else:
        module = factory()
    if not isinstance(module, nn.Module):
        raise OptionError(f"the model factory returned {type(module).__name__} for rank {rank}, not a module")
    return module


def _parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _frozen(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, p) for name, p in module.named_parameters() if not p.requires_grad)


def _rebuild(optimizer: Optimizer, module: nn.Module, source: nn.Module) -> Optimizer:
    twins = dict(zip(source.parameters(), module.parameters(), strict=True))
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if p not in twins]
        if unknown:
            raise OptionError(
                f"the optimizer holds {len(unknown)} parameters that are not the model's; make it from "
                f"model.parameters()"
            )
        groups.append({**group, "params": [twins[parameter] for parameter in group["params"]]})
    try:
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
    except TypeError as error:
        raise OptionError(
            f"{type(optimizer).__name__} cannot be rebuilt for each device ({error}); give a factory: "
            f"optimizer=lambda params: {type(optimizer).__name__}(params, ...)"
        ) from error
    twin.defaults = dict(optimizer.defaults)
    if optimizer.state:
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin
