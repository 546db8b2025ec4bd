"""Shallow replicas of a module: modules with the same attributes, and tables of tensors of their own.

Hooks and configurations are the module's own objects, so a replica follows them by construction; lists,
dicts, sets and deques are copied, and plain tensors and arrays. What a forward sets on a replica, or writes
to such a copy, is dropped when the replica is renewed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from operator import eq, is_, is_not
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdp.device.compiled import compiled_attributes

__all__ = ["SHARED", "ShallowReplicas"]

SHARED = frozenset(vars(nn.Module()))
"""Attributes of torch's own, to which no forward writes, but for tables of hooks."""

CONTAINERS = (list, tuple, dict, set, deque)

MOST_ENTRIES = 256
"""Longest container whose entries are looked at: layers are listed, not numbers."""


class ShallowReplicas:
    """Shallow replicas of one module, kept from call to call.

    A replica has twins of all parts of the module. Attributes that are bound methods of a part, or lists,
    tuples, dicts and partial functions with parts in them, have the twins in their place. Scripted parts, and
    what other objects and functions refer to, are shared.

    Args:
        module: The module; its parts and attributes may change at any time.
        count: Number of replicas.

    Threads: one at a time; none may be inside a replica.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        self._module = module
        self._count = count
        self._parts: list[_Part] = []
        self._twins: list[dict[int, nn.Module]] = []

    @property
    def parts(self) -> list[nn.Module]:
        """The module and its parts, each once, as they were at the last `look`."""
        return [part.module for part in self._parts]

    def look(self) -> None:
        """Follow changes of the module's parts and attributes."""
        if not self.is_same():
            known = {id(part.module): part for part in self._parts if part.is_same_class}
            modules = [
                module for module in self._module.modules() if not isinstance(module, torch.jit.ScriptModule)
            ]
            self._parts = [known.get(id(module)) or _Part(module, self._count) for module in modules]
            for part in self._parts:
                part.children, part.attributes = dict(part.module._modules), {}
            self._twins = [
                {id(part.module): part.twins[number] for part in self._parts} for number in range(self._count)
            ]
        for part in self._parts:
            own = vars(part.module)
            if not _is_same(own, part.attributes):
                part.attributes = dict(own)
                part.hooks = [key for key in own if key.endswith("_hooks") and "ward" in key]
                part.state = [key for key in own if key not in SHARED and _holds_state(own[key])]
                part.templates = [self._template(part, number) for number in range(self._count)]

    def is_same(self) -> bool:
        """Whether the module has the same parts as at the last look."""
        return bool(self._parts) and all(
            part.is_same_class and _is_same(part.module._modules, part.children) for part in self._parts
        )

    def renew(
        self, number: int, instead: Mapping[int, Tensor], own_copy: Callable[[Tensor], Tensor] = Tensor.clone
    ) -> nn.Module:
        """A replica with the module's attributes as they are now.

        Args:
            number: Number of the replica.
            instead: Tensors in the place of the module's, by the identity of those.
            own_copy: Copies a plain tensor for it.
        """

        def replaced(numbers: Any) -> Any:
            if not isinstance(numbers, Tensor):
                return numbers.copy()
            if id(numbers) in instead:
                return instead[id(numbers)]
            is_state = type(numbers) is Tensor and not numbers.requires_grad
            return own_copy(numbers) if is_state else numbers

        follow = _Follow(self._twins[number], replaced)
        for part in self._parts:
            own = part.templates[number].copy()
            own["_parameters"] = _replaced(part.module._parameters, instead)
            own["_buffers"] = _replaced(part.module._buffers, instead)
            own["_modules"] = own["_modules"].copy()
            for key in part.state:
                own[key] = follow(part.attributes[key])  # a forward may write to it, and read it
            for key in part.hooks:
                own[key] = own[key].copy()  # a forward may register some
            object.__setattr__(part.twins[number], "__dict__", own)
        return self._parts[0].twins[number]

    def hooks(self) -> Iterator[tuple[nn.Module, Any]]:
        """The hooks of the module's parts, but for those of its state."""
        for part in self._parts:
            for key in part.hooks:
                for hook in part.attributes[key].values():
                    yield part.module, hook

    def tables(self, number: int) -> list[dict[str, Tensor | None]]:
        """The tables of buffers of a replica's parts, as its last forward has left them."""
        return [part.twins[number]._buffers for part in self._parts]

    def _template(self, part: _Part, number: int) -> dict[str, Any]:
        """The attributes of a twin, but for its tensors."""
        twins, twin = self._twins[number], part.twins[number]
        follow = _Follow(twins)
        own = {key: value if key in SHARED else follow(value) for key, value in part.attributes.items()}
        own["_modules"] = {key: twins.get(id(child), child) for key, child in part.children.items()}
        return own | compiled_attributes(part.module, twin, own)


class _Part:
    """A part of the module, and its twins.

    Attributes:
        children: Its submodules at the last look.
        attributes: Its attributes then.
        state: Names of the attributes that a forward may write to: lists, dicts, tensors and the like.
        hooks: Names of the tables of forward and backward hooks.
        templates: Attributes of each twin, but for tensors.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        self.module = module
        # Without the arguments that its class may want.
        self.twins: list[nn.Module] = [object.__new__(type(module)) for _ in range(count)]
        self.children: dict[str, nn.Module | None] = {}
        self.attributes: dict[str, Any] = {}
        self.state: list[str] = []
        self.hooks: list[str] = []
        self.templates: list[dict[str, Any]] = []

    @property
    def is_same_class(self) -> bool:
        """Whether the module is of the class of its twins: a parametrization gives it another."""
        return type(self.module) is type(self.twins[0])


def _is_same(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two tables have the same objects by the same names, in the same order."""
    return (
        len(mine) == len(other) and all(map(is_, mine.values(), other.values())) and all(map(eq, mine, other))
    )


def _replaced(table: Mapping[str, Tensor | None], instead: Mapping[int, Tensor]) -> dict[str, Tensor | None]:
    return {name: instead.get(id(tensor), tensor) for name, tensor in table.items()}


def _holds_state(value: Any) -> bool:
    """Whether an attribute can be written to, or has something in it that can be."""
    if isinstance(value, tuple):
        return any(map(_holds_state, value))
    return isinstance(value, (Tensor, np.ndarray, *CONTAINERS))


class _Follow:
    """Values with twins in the place of the module's parts, and containers of their own.

    Args:
        twins: By the identity of the parts.
        replaced: What stands in the place of a tensor or array.
    """

    def __init__(
        self, twins: Mapping[int, nn.Module], replaced: Callable[[Any], Any] = lambda numbers: numbers
    ) -> None:
        self._twins = twins
        self._replaced = replaced
        self._copies: dict[int, Any] = {}  # two attributes may be one list

    def __call__(self, value: Any) -> Any:
        """A value; itself where it holds neither parts nor containers."""
        if isinstance(value, nn.Module):
            return self._twins.get(id(value), value)
        if type(value) is MethodType:
            own = self._twins.get(id(value.__self__))
            return value if own is None else MethodType(value.__func__, own)
        if type(value) is partial:
            named = {key: self(keyword) for key, keyword in value.keywords.items()}
            return partial(self(value.func), *map(self, value.args), **named)
        if isinstance(value, tuple):
            entries = tuple(map(self, value))
            if not any(map(is_not, entries, value)):
                return value
            return type(value)._make(entries) if hasattr(value, "_make") else entries
        if isinstance(value, (Tensor, np.ndarray, *CONTAINERS)) and id(value) not in self._copies:
            if isinstance(value, (Tensor, np.ndarray)):
                self._copies[id(value)] = self._replaced(value)
            else:
                self._copy(value)
        return self._copies.get(id(value), value)

    def _copy(self, value: Any) -> None:
        made = self._copies[id(value)] = copy(value)  # it may contain itself
        if len(value) <= MOST_ENTRIES and not isinstance(value, set):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                made[key] = self(one)
