"""Optimizers for a replica's parameters: rebuilt from the user's, or from a factory that reads no others."""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.errors import OptionError
from flowdp.policy.formats import format_error

__all__ = ["check_factory", "leaves", "rebuild", "variables"]

_NONE = object()
_REBUILT = {"param_groups", "state", "defaults"}
_HOOKS = "_optimizer_"  # begins the names of torch's dicts of hooks


def rebuild(optimizer: Optimizer, module: nn.Module, source: nn.Module) -> Optimizer:
    """Rebuild an optimizer with a replica's parameters in place of those of `source`, its model.

    Raises:
        OptionError: The optimizer holds other parameters, or something that cannot be copied.
    """
    kind = type(optimizer).__name__
    _check_own(optimizer)
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
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise OptionError(
            f"{kind} cannot be rebuilt for each device ({format_error(error)}); give a "
            f"factory: optimizer=lambda params: {kind}(params, ...)"
        ) from error
    twin.defaults = dict(optimizer.defaults)
    if optimizer.state:
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _copy_attributes(optimizer, twin, module, source)
    return twin


def _copy_attributes(optimizer: Optimizer, twin: Optimizer, module: nn.Module, source: nn.Module) -> None:
    """Give the twin the attributes that its constructor has made from defaults, or not at all."""
    pairs = zip(_parts(source), _parts(module), strict=True)
    memo: dict[int, Any] = {id(mine): other for mine, other in pairs}
    memo[id(optimizer)] = twin
    known = frozenset(memo)
    for name, value in vars(optimizer).items():
        made = vars(twin).get(name, _NONE)
        if made is value or name in _REBUILT or name.startswith(_HOOKS):
            continue
        if callable(getattr(type(optimizer), name, None)):  # a scheduler's count of steps
            continue
        if _is_compiled_alike(value, made, memo):
            continue
        try:
            _check_data(value, known)
            copied = copy.deepcopy(value, memo)
        except Exception as error:
            kind = type(optimizer).__name__
            raise OptionError(
                f"optimizer: the attribute {name!r} of the {kind} cannot be copied for each device "
                f"({format_error(error)}); give a factory: optimizer=lambda params: {kind}(params, ...)"
            ) from error
        if isinstance(copied, Tensor) and isinstance(made, Tensor):
            copied = copied.to(made.device)
        vars(twin)[name] = copied


def _is_compiled_alike(value: object, made: object, memo: dict[int, Any]) -> bool:
    """Whether both are `torch.compile` of a common function, or of a method of each."""
    mine, other = (getattr(one, "_torchdynamo_orig_callable", None) for one in (value, made))
    return mine is not None and bool(copy.deepcopy(mine, memo) == other)


def _parts(module: nn.Module) -> list[object]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def check_factory(factory: object, source: nn.Module) -> None:
    """Check that a factory does not look for the parameters of the user's module among a replica's.

    It would find none of them, and take all for others. Seen are its arguments, closure and globals.

    Args:
        factory: Factory of an optimizer.
        source: The module that is copied for each device.

    Raises:
        OptionError: It has them, or their id(), in a variable.
    """
    own = {id(parameter) for parameter in source.parameters()}
    for name, value in variables(factory):
        for leaf in leaves(value):
            if id(leaf) in own or (type(leaf) is int and leaf in own):
                raise OptionError(
                    f"optimizer: the factory reads {name!r}, which has parameters of the model that you gave "
                    "or their id(), and it is called with those of a copy: let it take the copy, and tell "
                    "its parameters apart by name, optimizer=lambda model: ... model.named_parameters()"
                )


def variables(function: object) -> Iterator[tuple[str, object]]:
    """The variables from outside that a function reads."""
    if isinstance(function, partial):
        yield "an argument", (function.args, function.keywords)
        yield from variables(function.func)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    yield "a default", (function.__defaults__ or (), function.__kwdefaults__ or {})
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for name in _globals(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _globals(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _globals(part)


def _check_data(value: object, known: frozenset[int]) -> None:
    """Check that a copy of an attribute would not speak of the user's optimizer or parameters.

    Raises:
        TypeError: It would.
    """
    for leaf in leaves(value):
        if isinstance(leaf, FunctionType) and leaf.__closure__:
            raise TypeError(f"{leaf.__qualname__} is a function with variables of its own")
        if type(leaf) is int and leaf in known:
            raise TypeError("it has the id() of a parameter")


def leaves(value: object) -> Iterator[object]:
    """The values inside of plain containers and partials, keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    elif isinstance(value, partial):
        value = [value.func, value.args, value.keywords]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def _check_own(optimizer: Optimizer) -> None:
    """Check that the optimizer behaves as its class does.

    Raises:
        OptionError: It has hooks, or methods of its own.
    """
    kind = type(optimizer).__name__
    if _own_hooks(optimizer):
        raise OptionError(
            f"optimizer: the {kind} has hooks (register_step_pre_hook and its like), which those of the "
            "replicas would not have: register them in a factory, optimizer=lambda params: ..."
        )
    for name, value in vars(optimizer).items():
        method = getattr(type(optimizer), name, None)
        if callable(method) and not _is_counted(value, method):
            raise OptionError(
                f"optimizer: the {kind} has a {name}() of its own, which those of the replicas would not "
                f"have: write it in a subclass of {kind}, or give a factory, optimizer=lambda params: ..."
            )


def _is_counted(value: object, method: object) -> bool:
    """Whether a scheduler of torch has put it there, to count the calls of the method."""
    return hasattr(value, "_wrapped_by_lr_sched") and getattr(value, "__wrapped__", None) is method


def _own_hooks(optimizer: Optimizer) -> list[Any]:
    """The user's hooks on an optimizer, without those that `setup` has left there."""
    dicts = [value for name, value in vars(optimizer).items() if name.startswith(_HOOKS)]
    hooks = [hook for held in dicts for hook in held.values()]
    modules = (getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks)
    return [hook for hook, name in zip(hooks, modules, strict=True) if not name.startswith("flowdp.")]
