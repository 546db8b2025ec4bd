"""Copies of the user's optimizer for a replica's parameters, and of its state, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from flowdp.errors import OptionError
from flowdp.policy.formats import format_error

__all__ = ["leaves", "load_state", "rebuild"]


def rebuild(optimizer: Optimizer, module: nn.Module, source: nn.Module) -> Optimizer:
    """A copy of an optimizer, with a replica's parameters in place of those of `source`, its model.

    Raises:
        OptionError: The optimizer holds other parameters, or something that cannot be copied.
    """
    kind = type(optimizer).__name__
    parameters = set(source.parameters())
    unknown = [one for group in optimizer.param_groups for one in group["params"] if one not in parameters]
    if unknown:
        raise OptionError(
            f"the optimizer holds {len(unknown)} parameters that are not the model's; make it from "
            f"model.parameters()"
        )
    _check_own(optimizer)
    memo: dict[int, Any] = {id(mine): its for mine, its in zip(_parts(source), _parts(module), strict=True)}
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    # Hooks, and a scheduler's count of the steps in place of a method, stay with the user's.
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.endswith("_hooks") and not callable(getattr(type(optimizer), name, None))
    }
    try:
        vars(twin).update(copy.deepcopy(kept, memo))
    except Exception as error:
        raise OptionError(
            f"{kind} cannot be copied for each device ({format_error(error)}); give a "
            f"factory: optimizer=lambda params: {kind}(params, ...)"
        ) from error
    Optimizer.__setstate__(twin, {})  # makes the dicts of hooks
    if twin.state:
        twin.load_state_dict(twin.state_dict())  # brings the state to the parameters' device
    return twin


def _parts(module: nn.Module) -> list[object]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


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
    dicts = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    hooks = [hook for held in dicts for hook in held.values()]
    modules = (getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks)
    return [hook for hook, name in zip(hooks, modules, strict=True) if not name.startswith("flowdp.")]


def load_state(optimizer: Optimizer, saved: Mapping[str, Any], *, with_groups: bool) -> None:
    """Load a state, with which nothing is shared; the groups stay the objects that they are.

    Args:
        optimizer: Optimizer whose state is replaced.
        saved: `state_dict()` of another optimizer of the same parameters in the same order.
        with_groups: Whether the options of the groups are loaded, too, the rates among them.

    Streams:
        Enqueued on the current ones of both devices.
    """
    groups = optimizer.param_groups
    optimizer.load_state_dict(dict(saved))
    loaded, optimizer.param_groups = optimizer.param_groups, groups
    for group, options in zip(groups, loaded, strict=True) if with_groups else ():
        for name, value in options.items():
            # A captured step reads the tensor that is there.
            if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
    # Torch has put the state where it belongs, in the dtype of the parameter. Now each value becomes the
    # saved one, and this optimizer's alone.
    parameters = dict(enumerate(parameter for group in groups for parameter in group["params"]))
    for key, entry in saved["state"].items():
        placed = optimizer.state[parameters.get(key, key)]
        for name in entry.keys() & placed.keys():
            placed[name] = _as_saved(entry[name], placed[name])


def _as_saved(value: Any, placed: Any) -> Any:
    devices = [leaf.device for leaf in tree_leaves(placed) if isinstance(leaf, Tensor)]

    def copied(leaf: Any) -> Any:
        return leaf.to(devices[0], copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copied, value)
