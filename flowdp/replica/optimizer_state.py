"""The state of one optimizer, given to another one that steps the same parameters elsewhere, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["load_state"]


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
