"""Guards of a recorded step: the state that it took from Python, compared before each step.

A graph holds numbers, choices and tensors as they were when it was recorded. Watched are: the attributes of
all modules, training flags and hooks among them; their parameters, buffers and hooks; lists, dicts and sets
in attributes, by content; the arguments, closures and globals of the loss, of the modules' own methods and
of hooks, and of functions that these name; and torch's switches. Not seen are other sources of change, as
the time, a file, or a generator of Python's: those show in a comparison with an eager step.

The look is one comparison of tuples for each table, by identity first, so it costs some 10 ns for a value.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

__all__ = ["Guards"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose values are the same where they are equal."""

NAMESPACES = (SimpleNamespace, Namespace)
"""Types of Python's own whose objects are settings."""

RANDOM = ("random", "numpy.random")
"""Modules whose numbers a graph would repeat; a comparison sees that by chance alone."""

MOST = 1000
"""Items of a container whose contents are looked at; of longer ones, the length."""

OBSCURE = "a watched value cannot be compared with its earlier one"

DEPTH = 3
"""Functions that name functions that name functions are followed so far."""

_GONE = object()
_OWN = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch", "numpy", "flowdp", "builtins")
_FREE = attrgetter("requires_grad")


class Guards:
    """Tells whether anything that a recorded step depends on has changed.

    Args:
        modules: Names and modules: the replica's, and those that the loss holds.
        loss: The function of the step.

    Attributes:
        modules: All modules that the step reads, the given ones first.
        obstacle: Why nothing that depends on this state is captured: it is an iterator, say; None: nothing
            stands in the way.

    Threads: the rank's.
    """

    def __init__(self, modules: Mapping[str, nn.Module], loss: Callable[..., Any]) -> None:
        self._roots = dict(modules)
        self._loss = loss
        self.retake()

    def retake(self) -> None:
        """Take the state anew, as it is now."""
        self._tables: list[tuple[str, dict[Any, Any], tuple[Any, ...]]] = []  # name, table, keys
        self._empty: list[tuple[str, Mapping[Any, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []  # name, object, copy
        self._long: list[tuple[str, Any, int]] = []  # containers: name, object, length
        self._cells: list[tuple[str, CellType]] = []
        self._variables: list[tuple[str, dict[str, Any], str]] = []
        self.obstacle: str | None = None
        self._seen: set[int] = set()
        self.modules: list[nn.Module] = []
        self._tensors: list[tuple[str, Tensor]] = []
        self._homes: list[dict[str, Any]] = []  # parameters and buffers of the modules
        self._held: list[tuple[str, Any, str]] = []  # other tensors: name, table, key
        for root, module in self._roots.items():
            for name, part in module.named_modules(prefix=root):
                self._watch_module(name, part)
        self._watch_function("the loss", self._loss, DEPTH)
        self._picks = [(_picker(keys), table) for _, table, keys in self._tables]
        self._dicts = [table for _, table, _ in self._tables]
        self._blank = [table for _, table in self._empty]
        self._parameters = [one for _, one in self._tensors if isinstance(one, nn.Parameter)]
        self._owned = [one for _, one in self._tensors]
        # Tensors are told apart as objects: another one may hold the same numbers.
        self._held = [
            (f"{where}.{key}", table, key)
            for where, table, keys in self._tables
            for key in keys
            if isinstance(table[key], Tensor)
        ] + [one for one in self._variables if isinstance(one[1].get(one[2]), Tensor)]
        self._tensor_cells = [one for _, one in self._cells if isinstance(one.cell_contents, Tensor)]
        self._kept = [table.get(key) for _, table, key in self._held]  # an id is not given twice meanwhile
        self._values = self._look()
        self._copies = [copy for _, _, copy in self._containers]
        self._handles = RemovableHandle.next_id
        self._hooked = [*map(_hooks_of, self._parameters)]

    def changed(self) -> str | None:
        """The first thing that has changed, in words; None where nothing has."""
        try:
            if (
                self._has_same_hooks()
                and self._look() == self._values
                and [own for _, own, _ in self._containers] == self._copies
                and all(len(own) == length for _, own, length in self._long)
            ):
                return None
        except Exception:  # tensors and arrays that are compared say so by an error
            pass
        try:
            return self._explain() or OBSCURE
        except Exception:  # an object that is gone, or changes meanwhile
            return OBSCURE

    @property
    def state(self) -> list[Tensor]:
        """Parameters and buffers of all modules, and tensors that are held elsewhere."""
        held = [table.get(key) for _, table, key in self._held]
        cells = [cell.cell_contents for cell in self._tensor_cells]
        found = [*self._owned, *(one for one in (*held, *cells) if isinstance(one, Tensor))]
        return list({id(one): one for one in found if one.layout is torch.strided}.values())

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _has_same_hooks(self) -> bool:
        # Torch counts all hooks that it registers: no table of hooks is touched where none was.
        if RemovableHandle.next_id == self._handles:
            return True
        handles = RemovableHandle.next_id
        if any(self._blank) or [*map(_hooks_of, self._parameters)] != self._hooked:
            return False
        self._handles = handles
        return True

    def _look(self) -> tuple[Any, ...]:
        return (
            [pick(table) for pick, table in self._picks],
            [*map(len, self._dicts)],
            [*map(type, self.modules)],
            [*map(_FREE, self._parameters)],
            [*map(Tensor.data_ptr, self._owned), *map(Tensor.numel, self._owned)],
            [*map(id, chain.from_iterable(map(dict.values, self._homes)))],
            [_stamp(table.get(key)) for _, table, key in self._held],
            [_stamp(cell.cell_contents) for cell in self._tensor_cells],
            [cell.cell_contents for _, cell in self._cells],
            [space.get(name, _GONE) for _, space, name in self._variables],
            _switches(),
        )

    # ------------------------------------------------------------ gathering
    def _watch_module(self, name: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        where = name or "the model"
        is_hooks = {key for key in _OWN if "_hooks" in key}
        self._tables.append((where, vars(module), tuple(key for key in vars(module) if key not in is_hooks)))
        self._homes += [module._parameters, module._buffers]
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                continue
            if type(value) in (list, set, deque) or (isinstance(value, dict) and key not in _OWN):
                self._container(f"{where}.{key}", value, DEPTH)
            elif isinstance(value, dict):
                self._table(f"{where}.{key}", value)
                if key.endswith("_hooks"):
                    for hook in value.values():
                        self._watch_function(f"a hook of {where}", hook, DEPTH)
            elif not isinstance(value, (Tensor, nn.Module)):
                self._watch_value(f"{where}.{key}", value, DEPTH)
        for table in (module._parameters, module._buffers):
            self._tensors += [(f"{where}.{key}", one) for key, one in table.items() if one is not None]
        self._watch_class(type(module), DEPTH)

    def _watch_class(self, kind: type, depth: int) -> None:
        """Look at the methods of a user's class."""
        for base in kind.__mro__:
            if not _is_foreign(base.__module__):
                if id(base) in self._seen:
                    continue
                self._methods(base)
                for name, value in list(vars(base).items()):
                    if isinstance(value, (list, dict, set, deque)) and not name.startswith("__"):
                        self._container(f"{base.__name__}.{name}", value, depth)
                    getter = value.fget if isinstance(value, property) else value
                    self._watch_function(base.__name__, getter, depth)

    def _methods(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        names = [name for name, value in vars(kind).items() if not name.startswith("__")]
        self._variables += [(f"{kind.__name__}.{name}", vars(kind), name) for name in names]  # type: ignore[misc]

    def _watch_function(self, where: str, function: object, depth: int) -> None:
        if isinstance(function, partial):
            self._watch_value(f"an argument of {where}", function.args, depth)
            self._watch_value(f"an argument of {where}", function.keywords, depth)
            self._watch_function(where, function.func, depth)
            return
        if isinstance(function, (staticmethod, classmethod, MethodType)):
            if isinstance(function, MethodType):
                self._watch_value(f"the object of {where}", function.__self__, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            function = getattr(function, "__wrapped__", function)  # of a cache, say
        if not isinstance(function, FunctionType):
            if not isinstance(function, (type, nn.Module)) and callable(function):
                self._watch_value(where, function, depth)
            return
        if id(function) in self._seen or depth == 0 or _is_library(function.__module__, inner=True):
            return
        self._seen.add(id(function))
        self._watch_value(f"a default of {where}", (function.__defaults__, function.__kwdefaults__), depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                self._watch_value(f"{name!r}, a variable of {where}", cell.cell_contents, depth)
                self._cells.append((f"{name!r}, a variable of {where}", cell))
        self._globals(where, function, depth)

    def _globals(self, where: str, function: FunctionType, depth: int) -> None:
        space = function.__globals__
        names = _names(function)
        for name in names:
            if name not in space:
                continue
            value = space[name]
            told = f"{name!r}, a global of {where}"
            self._variables.append((told, space, name))
            if isinstance(value, ModuleType):
                if value.__name__ in RANDOM or (value.__name__ == "numpy" and "random" in names):
                    self._refuse(f"{where} draws by {name}, which a graph would do once: let torch do it")
                if not _is_foreign(value.__name__):
                    inside = vars(value)
                    for key in names:
                        if key in inside:
                            self._variables.append((f"{name}.{key}", inside, key))
                            self._watch_value(f"{name}.{key}", inside[key], depth)
            else:
                self._watch_value(told, value, depth)

    def _watch_value(self, where: str, value: object, depth: int) -> None:
        """Look inside of a value, too: a container, a function, or a plain object."""
        if isinstance(value, type) and not _is_foreign(value.__module__) and depth > 0:
            self._watch_class(value, depth - 1)
        if isinstance(value, (*PLAIN, Tensor, type, ModuleType)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            for name, part in value.named_modules(prefix=where):
                self._watch_module(name, part)
            return
        if hasattr(type(value), "__next__"):
            self._refuse(f"{where} is an iterator, from which a graph would not take")
            return
        if isinstance(value, torch.Generator) or type(getattr(value, "__self__", None)) is random.Random:
            self._refuse(f"{where} draws random numbers, which a graph would draw once: let torch do it")
            return
        if isinstance(value, (FunctionType, MethodType, partial)):
            self._watch_function(f"{getattr(value, '__name__', where)}()", value, depth - 1)
            return
        self._seen.add(id(value))
        if isinstance(value, (list, dict, set, deque)):
            self._container(where, value, depth)
        elif isinstance(value, tuple):
            for item in value:
                self._watch_value(where, item, depth)
        elif isinstance(value, NAMESPACES) or not _is_foreign(type(value).__module__):
            inside = getattr(value, "__dict__", {})
            self._table(where, inside)
            if depth > 0:
                for key, item in list(inside.items()):
                    self._watch_value(f"{where}.{key}", item, depth - 1)
            self._watch_class(type(value), depth - 1)

    def _table(self, where: str, table: dict[Any, Any]) -> None:
        if table:
            self._tables.append((where, table, tuple(table)))
        else:
            self._empty.append((where, table))

    def _container(self, where: str, value: Any, depth: int) -> None:
        if len(value) > MOST:
            self._long.append((where, value, len(value)))
            return
        self._containers.append((where, value, _copied(value, MOST)))
        for item in list(value.values() if isinstance(value, dict) else value):
            if not isinstance(item, PLAIN):
                self._watch_value(f"an item of {where}", item, depth)

    # ------------------------------------------------------------ in words
    def _explain(self) -> str | None:
        for where, table in self._empty:
            if table:
                return f"{where} has been added to"
        for (where, table, keys), before, length in zip(self._tables, *self._values[:2], strict=True):
            for key, other in zip(keys, before, strict=True):
                if not _is_same(now := table.get(key, _GONE), other):
                    return f"{where}.{key} {_how(other, now)}"
            if len(table) != length:
                return f"{where} has {len(table)} entries instead of {length}"
        for (where, cell), before in zip(self._cells, self._values[8], strict=True):
            if not _is_same(cell.cell_contents, before):
                return f"{where} {_how(before, cell.cell_contents)}"
        for (where, space, name), before in zip(self._variables, self._values[9], strict=True):
            if not _is_same(now := space.get(name, _GONE), before):
                return f"{where} {_how(before, now)}"
        for where, own, copy in self._containers:
            if not _is_same(own, copy):
                return f"the contents of {where} have changed"
        for where, own, length in self._long:
            if len(own) != length:
                return f"{where} has {len(own)} entries instead of {length}"
        return self._explain_tensors()

    def _explain_tensors(self) -> str | None:
        _, _, types, free, pointers, homes, held, cells, *_, switches = self._values
        if [_stamp(cell.cell_contents) for cell in self._tensor_cells] != cells:
            return "a tensor in a variable of a function is another one"
        owners = [(module, key) for module in self.modules for key in (*module._parameters, *module._buffers)]
        now = [*map(id, chain.from_iterable(map(dict.values, self._homes)))]
        for (module, key), own, other in zip(owners, now, homes, strict=False):
            if own != other:
                return f"{key!r} of a {type(module).__name__} is another object"
        if len(now) != len(homes):
            return "a parameter or buffer was registered or removed"
        for (name, table, key), other in zip(self._held, held, strict=True):
            if _stamp(table.get(key)) != other:
                return f"{name} is another object"
        named = [(name, one) for name, one in self._tensors if isinstance(one, nn.Parameter)]
        for (name, one), was_free, had in zip(named, free, self._hooked, strict=True):
            if one.requires_grad != was_free:
                return f"{name}.requires_grad was {was_free}, it is {one.requires_grad}"
            if _hooks_of(one) != had:
                return f"the hooks of {name} have changed"
        sizes = pointers[len(self._tensors) :]
        for (name, tensor), pointer, size in zip(self._tensors, pointers, sizes, strict=False):
            if tensor.data_ptr() != pointer or tensor.numel() != size:
                return f"{name} lies in other memory"
        if [*map(type, self.modules)] != types:
            return "the class of a module has changed"
        if _switches() != switches:
            return f"torch's switches were {switches}, they are {_switches()}"
        return None


def _switches() -> tuple[Any, ...]:
    """State of torch that decides which operations a step is made of."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        len(torch_module._global_forward_hooks),
        len(torch_module._global_forward_pre_hooks),
        len(torch_module._global_backward_hooks),
        len(torch_module._global_backward_pre_hooks),
    )


def _hooks_of(parameter: Tensor) -> tuple[tuple[int, ...], ...]:
    """The numbers of a parameter's hooks: their tables stay the same objects when hooks come and go."""
    return (
        tuple(parameter._backward_hooks or ()),
        tuple(parameter._post_accumulate_grad_hooks or ()),
    )


def _stamp(value: Any) -> object:
    """Mark of a tensor that is held. A number on the host is copied into a kernel: its writes count, too."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return id(value), value._version
    return id(value)


def _picker(keys: tuple[Any, ...]) -> Callable[[dict[Any, Any]], tuple[Any, ...]]:
    """A function that takes the values of these keys, as a tuple; a missing key is an error."""
    return itemgetter(*keys) if len(keys) > 1 else lambda table: (table[keys[0]],)


def _names(function: FunctionType) -> Sequence[str]:
    found = dict.fromkeys(function.__code__.co_names)
    for part in function.__code__.co_consts:
        if hasattr(part, "co_names"):
            found.update(dict.fromkeys(part.co_names))
    return list(found)


def _is_library(module: str | None, *, inner: bool = False) -> bool:
    """Whether a module is a library's: its code does not change during a run.

    With `inner` flowdp is none: a criterion lies in a closure of one of its functions.
    """
    space = (module or "").partition(".")[0]
    return space in _LIBRARIES and not (inner and space == "flowdp")


def _is_foreign(module: str | None) -> bool:
    return _is_library(module) or (module or "").partition(".")[0] in sys.stdlib_module_names


def _copied(value: Any, most: int) -> Any:
    """A container with copies of the containers inside."""
    if isinstance(value, dict) and len(value) <= most:
        # From a list of its items, made at once: the losses of other ranks may write to the same dict.
        return {key: _copied(item, most) for key, item in list(value.items())}
    if type(value) in (list, tuple, deque) and len(value) <= most:
        return type(value)(_copied(item, most) for item in value)
    return set(value) if isinstance(value, set) else value


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:
        return False


def _how(before: object, now: object) -> str:
    """Two values in words."""
    plain = (*PLAIN, tuple)
    if isinstance(before, plain) and isinstance(now, plain):
        return f"was {before!r}, it is {now!r}"
    if now is _GONE:
        return "is gone"
    return "is another object"
