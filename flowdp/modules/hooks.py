"""Functions that hold objects of a module, in the copies of it.

`copy.deepcopy` takes a function for an atom. So a hook that is a closure over its module, or a function that
was put in the place of a method, would work on the user's module when a replica calls it. Here such functions
are made anew, with cells that hold the replica's objects.

Other objects that hooks reach are common to all devices. Of results that are kept in one, the loop finds
those of the device that was last, so changes in them are looked for, too.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import WRAPPER_ASSIGNMENTS, cache, partial
from operator import is_not
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from torch import Tensor, nn

from flowdp.data.trees import tensors_of
from flowdp.errors import FlowdpError
from flowdp.modules.comparison import compare

__all__ = ["FUNCTIONS", "Outside", "Twins", "check_hooks", "parts_of", "twins_of"]

log = logging.getLogger("flowdp")

MOST_ENTRIES = 1_000
"""Most entries of a container in a closure that is looked into."""

MOST_OBJECTS = 500
"""Most objects outside the module that are looked at for one hook: closures may reach a whole program."""

DEEPEST = 5
"""Steps from a hook to an object: to the object of a closure, to its attribute, to a list in that one."""

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, ReferenceType)
"""Kinds of values that a copy has in common with its original, though they may hold parts of it."""

_CONTAINERS = (list, tuple, set, dict, deque)


class Twins:
    """The objects of a copy, by the originals, and the functions of the copy.

    Args:
        known: The copies, by the identity of the originals, which must live as long as this object.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = dict(known)
        self._cells: dict[int, CellType] = {}

    def rebind(self, copies: Iterable[Any]) -> None:
        """Replace the originals' functions in containers and objects of the copy by functions of the copy."""
        for made in copies:
            if isinstance(made, partial):
                words = {key: self.fit(one) for key, one in made.keywords.items()}
                refill: Any = made  # mypy knows nothing of its states
                refill.__setstate__((self.fit(made.func), self.fit(made.args), words, vars(made)))
            elif isinstance(made, (list, deque)):
                self._refit(made, enumerate(made))
            elif isinstance(made, dict):
                self._refit(made, made.items())
            elif not isinstance(made, (type, *FUNCTIONS)):
                table = getattr(made, "__dict__", None)
                if isinstance(table, dict):
                    self._refit(table, table.items())

    def _refit(self, made: Any, entries: Iterable[tuple[Any, Any]]) -> None:
        for key, entry in list(entries):
            fitting = self.fit(entry)
            if fitting is not entry:
                made[key] = fitting

    def fit(self, entry: Any) -> Any:
        """An entry of the copy: where it is a function, or a tuple of them, it holds the copy's objects."""
        if isinstance(entry, FUNCTIONS):
            return self.of(entry)
        if type(entry) is tuple:
            fitting = tuple(map(self.fit, entry))
            return fitting if any(map(is_not, fitting, entry)) else entry
        return entry

    def of(self, value: Any) -> Any:
        """The twin of a value: in a closure, a container with twins has one, too; else the value itself."""
        if id(value) in self._known:
            return self._known[id(value)]
        if not self._reaches(value):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (list, set, deque)):
            made: Any = value.copy()
            self._known[id(value)] = made
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(map(self.of, value))
            return made
        if isinstance(value, dict):
            made = self._known[id(value)] = value.copy()
            made.clear()
            made.update((self.of(key), self.of(entry)) for key, entry in value.items())
            return made
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, (BuiltinFunctionType, MethodWrapperType)):
            return getattr(self.of(value.__self__), value.__name__)
        if isinstance(value, ReferenceType):
            return ref(self.of(value()))
        words = {key: self.of(entry) for key, entry in value.keywords.items()}
        return type(value)(self.of(value.func), *map(self.of, value.args), **words)

    def _function(self, value: FunctionType) -> FunctionType:
        cells = value.__closure__ or ()
        new = [
            cell for cell in cells if id(cell) not in self._cells and any(map(self._reaches, _contents(cell)))
        ]
        self._cells.update((id(cell), CellType()) for cell in new)
        closure = tuple(self._cells.get(id(cell), cell) for cell in cells)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure or None)
        self._known[id(value)] = made  # it may hold itself
        for cell in new:
            self._cells[id(cell)].cell_contents = self.of(cell.cell_contents)
        made.__defaults__ = self.of(value.__defaults__)
        made.__kwdefaults__ = self.of(value.__kwdefaults__)
        for name in WRAPPER_ASSIGNMENTS:
            if hasattr(value, name):
                setattr(made, name, getattr(value, name))
        vars(made).update((key, self.of(entry)) for key, entry in vars(value).items())
        return made

    def _reaches(self, value: Any) -> bool:
        """Whether something that has a twin is in a value, by closures and plain containers."""
        seen: set[int] = set()
        todo = [value]
        while todo:
            part = todo.pop()
            if id(part) in self._known:
                return True
            if id(part) not in seen:
                seen.add(id(part))
                todo += parts_of(part)
        return False


def twins_of(modules: Iterable[nn.Module], copies: Iterable[nn.Module]) -> dict[int, Any]:
    """The modules of a copy, their parameters and buffers, by the identity of the originals."""
    twins: dict[int, Any] = {}
    for mine, theirs in zip(modules, copies, strict=False):
        twins[id(mine)] = theirs
        for kind in ("_parameters", "_buffers"):
            for key, tensor in vars(mine)[kind].items():
                if tensor is not None:
                    twins[id(tensor)] = vars(theirs)[kind].get(key)
    return twins


def parts_of(value: Any) -> list[Any]:
    """The values that a function or a plain container holds."""
    if isinstance(value, FunctionType):
        held = [content for cell in value.__closure__ or () for content in _contents(cell)]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        return held
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (BuiltinFunctionType, MethodWrapperType)):
        return [] if isinstance(value.__self__, ModuleType) else [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) is ReferenceType:
        return [value()]
    if type(value) not in _CONTAINERS or len(value) > MOST_ENTRIES:
        return []
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _contents(cell: CellType) -> list[Any]:
    """The content of a cell, if it has one."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


class Outside:
    """The objects that a module's hooks, of forward or of backward, reach and that are no part of it.

    Its length is the number of these objects.

    Threads: one; nothing else may use the module meanwhile.
    """

    def __init__(self, module: nn.Module, *, backward: bool = False) -> None:
        kind = "backward" if backward else "forward"
        self._held: list[tuple[str, Any]] = []
        self._before: list[list[Any]] = []
        hooks = [
            (f"{_name(hook)} of {name or 'the module'!r} ({type(part).__name__})", hook)
            for name, part in module.named_modules()
            for table in (f"_{kind}_hooks", f"_{kind}_pre_hooks")
            for hook in vars(part)[table].values()
        ]
        if not hooks:
            return
        seen = _own(module)
        for name, hook in hooks:
            self._held += [(name, held) for held in _reached(hook, seen)]

    def __len__(self) -> int:
        return len(self._held)

    def note(self) -> None:
        """Remember the present contents."""
        self._before = [_inside(held) for _, held in self._held]

    def changes(self) -> dict[str, list[Any]]:
        """The tensors and numbers that are new since the note, with their containers, by the hook's name."""
        found: dict[str, list[Any]] = {}
        for (name, held), before in zip(self._held, self._before, strict=True):
            now = _inside(held)
            if len(now) != len(before) or any(map(is_not, now, before)):
                old = set(map(id, before))
                if new := [one for one in now if id(one) not in old and _is_result(one)]:
                    found.setdefault(name, []).extend(new)
        return found


def check_hooks(
    module: nn.Module, runs: Sequence[Callable[[], object]], told: set[str], epsilon: float
) -> None:
    """Check that forward hooks keep no results of the batch outside the module: the loop would find a part's.

    Args:
        module: The module with its hooks.
        runs: Two calls of it, with the whole batch and with a part.
        told: Names that the log has had; those of hooks are added.
        epsilon: Coarsest rounding of the module's computation.

    Raises:
        FlowdpError: They keep a tensor.
    """
    outside = Outside(module)
    if not outside:
        return
    found: list[dict[str, list[Any]]] = []
    for run in runs:
        outside.note()
        run()
        found.append(outside.changes())
    whole, piece = found
    for name, kept in whole.items():
        if compare(list(tensors_of(kept)), list(tensors_of(piece.get(name))), epsilon):
            raise FlowdpError(
                f"the hook {name} keeps a tensor of the batch in an object of the loop, and each device has "
                "only a part of the batch: the loop would find the part of the device that was last. Return "
                "the tensor from forward; or, if the first device's part is enough, let the hook set an "
                "attribute of its first argument, the layer. (check=False in setup() leaves this check out.)"
            )
    names = [name for name in whole if name not in told]
    told.update(names)
    if names:
        log.warning(
            "the hook %s changes an object of the loop: it is called once by each device, with its part of "
            "the batch",
            ", the hook ".join(names),
        )


def _is_result(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return any(map(_is_result, _entries(value)))
    return isinstance(value, (Tensor, int, float, np.ndarray, np.generic)) and not isinstance(value, bool)


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _own(module: nn.Module) -> set[int]:
    """The identities of a module's parts and of all that is in their attributes."""
    seen: set[int] = set()
    todo: list[Any] = list(module.modules())
    for part in module.modules():
        hooks = {id(table) for name, table in vars(part).items() if "hooks" in name}
        todo += [value for value in vars(part).values() if id(value) not in hooks]
    while todo and len(seen) < 100 * MOST_OBJECTS:
        value = todo.pop()
        if id(value) not in seen and not isinstance(value, _CLOSED):
            seen.add(id(value))
            todo += [] if isinstance(value, (nn.Module, FunctionType)) else _inside(value)
    return seen


def _reached(hook: Any, seen: set[int]) -> list[Any]:
    """Functions, containers and objects that a hook reaches, without those seen; they are added to these."""
    found: list[Any] = []
    level = [hook]
    for _ in range(DEEPEST):
        level = [one for one in level if id(one) not in seen and not isinstance(one, (nn.Module, *_CLOSED))]
        level = list({id(one): one for one in level}.values())[: MOST_OBJECTS - len(found)]
        seen.update(map(id, level))
        found += level
        contents = [_inside(one) for one in level]
        level = [one for content in contents if len(content) <= MOST_ENTRIES for one in content]
    return found


def _inside(value: Any) -> list[Any]:
    """The values in a container, a function (with its globals) or an object."""
    if isinstance(value, FunctionType):
        names = _names(value.__code__) if str(value.__module__).partition(".")[0] not in _LIBRARIES else ()
        return parts_of(value) + [value.__globals__[name] for name in names if name in value.__globals__]
    if isinstance(value, (*FUNCTIONS, partial)):
        return parts_of(value)
    table = _table(value)
    if table is not None:
        return _entries(table)
    return list(value) if type(value) is tuple and len(value) <= MOST_ENTRIES else []


def _entries(table: Any) -> list[Any]:
    return list(table.values() if isinstance(table, dict) else table)


def _table(value: Any) -> Any:
    """A container that can be written to, or an object's attributes; None: it has none."""
    if isinstance(value, (list, dict, set, deque)):
        return value
    table = None if isinstance(value, (*FUNCTIONS, partial, *_CLOSED)) else getattr(value, "__dict__", None)
    return table if isinstance(table, dict) else None


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code, and code inside it, looks up."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


_LIBRARIES = frozenset(("torch", "numpy", "flowdp", *sys.stdlib_module_names))
"""Packages whose functions keep nothing for a loop in their globals."""

_CLOSED = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, Tensor)
"""Types of values that are not looked into."""
