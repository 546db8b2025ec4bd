"""The state of one optimizer, given to another one that steps the same parameters elsewhere."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

__all__ = ["copy_state"]


def copy_state(own: Optimizer, other: Optimizer) -> None:
    """Copy the state of another optimizer, bit for bit; the groups, and so the rates, stay.

    Not by `load_state_dict`, which casts the state to the dtype of its parameter.

    Args:
        own: Optimizer whose state is replaced.
        other: Optimizer of the same parameters in the same order; nothing is shared with it.

    Streams:
        Enqueued on the current ones of both devices.
    """
    twins = dict(zip(_parameters(other), _parameters(own), strict=True))
    before = dict(own.state)
    own.state.clear()
    for key, state in other.state.items():
        mine = twins.get(key, key)
        old = before.get(mine, {})
        own.state[mine] = {name: _like(value, old.get(name), key, mine) for name, value in state.items()}


def _like(value: Any, old: Any, key: Any, mine: Any) -> Any:
    """A copy of a value, where the one before it lay: a step's count may be on the host."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        is_beside = isinstance(key, Tensor) and leaf.device == key.device
        there = mine.device if is_beside else leaf.device
        return leaf.to(old.device if isinstance(old, Tensor) else there, copy=True)

    return tree_map(copied, value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
