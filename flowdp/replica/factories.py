"""Models, optimizers and criteria for each device, from instances or factories, checked.

Factories run one after another on the calling thread, rank 0 first, so that `torch.manual_seed` before the
start fixes the initial weights. All replicas start from rank 0's. Everything is built under the compute
stream of its rank, where it will be used: autograd's record of a parameter names the stream it saw.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.device.accelerator import device_module, is_accelerator
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import Lane
from flowdp.device.structure import check_no_overlap, check_same, structure
from flowdp.errors import OptionError
from flowdp.modules.stand_in import StandInModule
from flowdp.modules.training_mode import start_training
from flowdp.network.machines import Machines
from flowdp.replica.model_copy import CopyError, copy_module
from flowdp.replica.optimizer_copy import rebuild

__all__ = [
    "ModelOption",
    "OptimizerOption",
    "Optimizers",
    "all_of",
    "build_models",
    "build_optimizers",
    "check_closure",
    "check_hooks",
    "check_plain",
    "each_of",
    "equal_start",
    "flatten",
    "new_module",
    "seed_devices",
    "several_optimizers",
    "tensors_in",
]

log = logging.getLogger("flowdp")

T = TypeVar("T")

WRAPPERS = (StandInModule, nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Modules that stand for another one on several devices."""

ModelOption = nn.Module | Callable[..., nn.Module]
Optimizers = Sequence[Optimizer] | Mapping[Any, Optimizer]
"""The optimizers of a replica, in the form in which the user gave them; one alone is a sequence of one."""

OptimizerOption = Optimizer | Optimizers | Callable[..., Optimizer | Optimizers]


def build_models(model: ModelOption, lanes: Sequence[Lane], *, trains: bool = True) -> list[nn.Module]:
    """One module per device, in training mode; parts in eval mode of a module in training mode stay so.

    Args:
        model: A module, copied for every device and not touched, or a factory: called as `f(device)` if it
            has one required positional parameter, as `f(device=...)` if it names `device`, else as `f()`.
        lanes: One per rank.
        trains: False: they are for forwards alone, and keep the modes that they have.

    Raises:
        OptionError: It is neither, cannot be copied, returns something else or the same module twice, or has
            a trained parameter whose memory another tensor shares.
    """
    modules: list[nn.Module] = []
    for rank, lane in enumerate(lanes):
        lane.await_caller()
        with lane.on(lane.compute):
            modules.append(_build_model(model, lane.device, rank, modules, trains=trains))
            if trains:
                if rank == 0 and not modules[0].training:
                    log.warning(
                        "the model was given in eval mode, and is trained with all of its parts in training "
                        "mode; parts that are set to eval() in a model in training mode stay there: "
                        "model.train(); model.bn.eval()"
                    )
                start_training(modules[rank])
        lane.drain()
    return modules


def _build_model(
    model: ModelOption, device: torch.device, rank: int, modules: Sequence[nn.Module], *, trains: bool
) -> nn.Module:
    given = model if isinstance(model, nn.Module) else _call_factory(model, device, rank)
    check_plain(given)
    if trains:
        check_no_overlap(given)  # now: a copy, and a move to another device, part them
    module = _copy(given, device) if given is model else given
    if any(module is other for other in modules):
        raise OptionError(
            f"the model factory returned the same module for rank {rank} and an earlier rank: it must "
            f"build a new one at every call"
        )
    module.to(device)
    return module


def new_module(model: ModelOption, device: torch.device) -> nn.Module:
    """A module for use outside of a run: a copy of the user's, or one of the factory's.

    Raises:
        OptionError: It cannot be copied, or the factory makes none.
    """
    module = _copy(model, device) if isinstance(model, nn.Module) else _call_factory(model, device, 0)
    return module.to(device)


def check_plain(model: nn.Module) -> None:
    """Check that a model is modules of Python's alone, none of which has several devices of its own.

    Raises:
        OptionError: It, or a part of it, was made by torch.jit, or hands its batches to several devices.
    """
    for name, part in model.named_modules():
        which = f"its part {name!r}" if name else "it"
        if isinstance(part, torch.jit.ScriptModule):
            raise OptionError(
                f"model: {which} was made by torch.jit.script or trace, and cannot be copied for training: "
                "give the module that it was made from, and script the trained one"
            )
        if isinstance(part, WRAPPERS):
            raise OptionError(
                f"model: {which} is a {type(part).__module__.partition('.')[0]} {type(part).__name__}, which "
                "is set up already, as after a cell that was run twice: give its .module, as in "
                "flowdp.setup(model.module, optimizer)"
            )


def check_hooks(module: nn.Module) -> None:
    """Check that no hook would change the gradients of a device's part, before they are averaged.

    Raises:
        OptionError: A parameter has hooks.
    """
    if (name := _hooked(module)) is not None:
        raise OptionError(
            f"policy='exact': parameter {name!r} has hooks (register_hook, "
            "register_post_accumulate_grad_hook), which would run on each device's part of the gradient, "
            "before the mean: change the gradients in optimizer.register_step_pre_hook, in the optimizer's "
            "factory, which sees their mean"
        )


def _hooked(module: nn.Module) -> str | None:
    """The name of a parameter that has hooks on its gradient."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return name
    return None


def equal_start(modules: Sequence[nn.Module], lanes: Sequence[Lane]) -> None:
    """Give all replicas rank 0's values, frozen parameters included.

    Args:
        modules: One per rank of this machine.
        lanes: Their lanes.

    Raises:
        OptionError: The replicas differ in structure, or nothing in them can be trained.
    """
    if not any(parameter.requires_grad for parameter in modules[0].parameters()):
        raise OptionError("the model has no parameter that requires grad: there is nothing to train")
    remedy = "the model factory must build the same model for every device"
    check_same([structure(module) for module in modules], remedy=remedy)
    for module, lane in zip(modules[1:], lanes[1:], strict=True):
        with lanes[0].on(lanes[0].compute), lane.on(lane.compute), torch.no_grad():
            for mine, theirs in zip(tensors_in(module), tensors_in(modules[0]), strict=True):
                mine.copy_(theirs)
        lane.drain()


def flatten(
    modules: Sequence[nn.Module],
    lanes: Sequence[Lane],
    optimizer: Optimizer | None = None,
    *,
    may_thaw: bool = False,
    spans: int = 1,
) -> list[FlatReplica]:
    """Flatten the replicas, by the groups of the first one's optimizer: all have one layout.

    Args:
        modules: One per rank of this machine.
        lanes: Their lanes.
        optimizer: That of the first rank; None: the order is that of the module.
        may_thaw: See `FlatReplica`.
        spans: See `FlatReplica`.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    numbers = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
    replicas: list[FlatReplica] = []
    for rank, (module, lane) in enumerate(zip(modules, lanes, strict=True)):
        pairs = zip(module.parameters(), modules[0].parameters(), strict=True)
        own: dict[Tensor, int] = {mine: numbers[first] for mine, first in pairs if first in numbers}
        with lane.on(lane.compute):
            replicas.append(FlatReplica(module, rank, may_thaw=may_thaw, spans=spans, groups=own))
            _restore_chunks(module)
        lane.drain()
    return replicas


def equal_machines(modules: Sequence[nn.Module], lanes: Sequence[Lane], machines: Machines) -> None:
    """Give the replicas of all machines the values of the first one's, frozen parameters included.

    Raises:
        CollectiveError: A machine was lost.
        OptionError: The model of another machine has another structure.
    """
    structures = machines.gather(structure(modules[0]))
    places = [f"on {name}" for name in machines.names]
    check_same(structures, places, "the script must build the same model on every machine")
    with lanes[0].on(lanes[0].compute), torch.no_grad():
        values = [tensor.to("cpu", copy=True).contiguous() for tensor in tensors_in(modules[0])]
    # Bytes: not every dtype travels, and none is to be changed on the way.
    machines.spread([value.reshape(-1).view(torch.uint8) for value in values if value.numel()])
    for module, lane in zip(modules, lanes, strict=True):
        with lane.on(lane.compute), torch.no_grad():
            for tensor, value in zip(tensors_in(module), values, strict=True):
                tensor.copy_(value)
        lane.drain()


def tensors_in(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def _restore_chunks(module: nn.Module) -> None:
    """Give recurrent layers on CUDA their weights back in the one chunk that cuDNN wants.

    Else it would gather them anew in every forward, with a warning. The chunk lies outside the flat memory,
    so these weights are copied in and out at each mean.
    """
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()


def build_optimizers(option: OptimizerOption, module: nn.Module, source: nn.Module | None) -> Optimizers:
    """The optimizers of one replica.

    Args:
        option: An instance, or a sequence or mapping of instances: each is rebuilt from its class, groups,
            state and attributes with the replica's parameters in place of the source's. Or a factory of such,
            which gets the parameters that require grad or, if it names `model`, the module.
        module: The replica.
        source: The module that instances were made for; None with a model factory.

    Raises:
        OptionError: It is neither, or it optimizes something else.
    """
    if isinstance(option, Optimizer | Sequence | Mapping):
        if source is None:
            raise OptionError(
                "an optimizer instance belongs to the parameters of one model: with a model factory, give an "
                "optimizer factory: optimizer=lambda params: ..."
            )
        return each_of(option, lambda optimizer: rebuild(optimizer, module, source))
    made: Any
    if "model" in _parameters(option):
        made = option(model=module)
    else:
        made = option([parameter for parameter in module.parameters() if parameter.requires_grad])
    own = set(module.parameters())
    return each_of(made, lambda optimizer: _check_made(optimizer, own))


def all_of(optimizers: Optimizers) -> list[Optimizer]:
    """The optimizers in order, without their names."""
    return list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)


def each_of(optimizers: object, take: Callable[[Any], T]) -> list[T] | dict[Any, T]:
    """The result of `take` for every optimizer, in the form in which they were given; of one alone a list."""
    if isinstance(optimizers, Mapping) and optimizers:
        return {name: take(optimizer) for name, optimizer in optimizers.items()}
    if isinstance(optimizers, Sequence) and optimizers:
        return [take(optimizer) for optimizer in optimizers]
    return [take(optimizers)]


def _check_made(made: object, own: set[nn.Parameter]) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise OptionError(f"the optimizer factory returned {type(made).__name__}, not a torch optimizer")
    if any(parameter not in own for group in made.param_groups for parameter in group["params"]):
        raise OptionError(
            "the optimizer factory used parameters of another model than the replica it was called for: "
            "build it from its argument, optimizer=lambda params: torch.optim.SGD(params, ...)"
        )
    return made


def check_closure(optimizer: Optimizer) -> None:
    """Check that an optimizer steps without a closure, as the step of a loss calls it.

    Raises:
        OptionError: It computes the loss itself.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure: give a "
            "train_step in place of the loss, which calls worker.optimizers[0].step(closure)"
        )


def several_optimizers(count: int) -> str:
    """Error text for several optimizers where one is needed."""
    return (
        f"the optimizer option gives {count} optimizers, and with a loss one takes the step: give a "
        "train_step, which says when each of them steps"
    )


def seed_devices(devices: Sequence[torch.device], seed: int, machine: int = 0) -> None:
    """Seed the generator of every accelerator, for dropout and the like; each differently.

    The CPU's generator belongs to the process, and the user.

    Args:
        devices: One per rank. Ranks that share a device share its generator.
        seed: Seed of the run.
        machine: Number of this machine, of several.
    """
    for place, device in enumerate(dict.fromkeys(devices)):
        if is_accelerator(device):
            state = np.random.SeedSequence(
                seed, spawn_key=(place, machine) if machine else (place,)
            ).generate_state(1, np.uint64)
            module = device_module(device)
            with module.device(device):
                module.manual_seed(int(state[0]))


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    if (name := _hooked(model)) is not None:
        raise OptionError(
            f"model: parameter {name!r} has hooks (register_hook), which the devices' copies would not have: "
            "change the gradients in optimizer.register_step_pre_hook, in the optimizer's factory; or, under "
            "another policy than 'exact', register the hooks in a factory, model=make_model"
        )
    try:
        return copy_module(model, device)
    except CopyError as error:
        raise OptionError(
            f"the model cannot be copied for each device ({error}); give a factory: "
            f"model=lambda: MyModel(...)"
        ) from error.__cause__


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
