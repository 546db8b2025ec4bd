"""Functions that hold objects of a module, in the copies of it.

`copy.deepcopy` takes a function for an atom. So a hook that is a closure over its module, or a function that
was put in the place of a method, would work on the user's module when a replica calls it. Here such functions
are made anew, with cells that hold the replica's objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import WRAPPER_ASSIGNMENTS, partial
from operator import is_not
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

__all__ = ["FUNCTIONS", "Twins", "parts_of"]

MOST_ENTRIES = 1_000
"""Entries of a container in a closure that is looked into."""

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, ReferenceType)
"""Kinds of values that a copy has in common with its original, though they may hold parts of it."""

_CONTAINERS = (list, tuple, set, dict, deque)


class Twins:
    """The objects of a copy, by the originals, and the functions of the copy.

    Args:
        known: The copies, by the identity of the originals, which must live as long as this.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = dict(known)
        self._cells: dict[int, CellType] = {}

    def pair(self, module: nn.Module, copy: nn.Module) -> None:
        """Know the submodules, parameters and buffers of a module and of its copy."""
        for mine, theirs in zip(module.modules(), copy.modules(), strict=False):
            self._known[id(mine)] = theirs
            for kind in ("_parameters", "_buffers"):
                for key, tensor in vars(mine)[kind].items():
                    if tensor is not None:
                        self._known[id(tensor)] = vars(theirs)[kind].get(key)

    def rebind(self, copies: Iterable[Any]) -> None:
        """Put functions of the copy in the place of the originals'.

        Args:
            copies: Containers and objects of the copy, each of them; they are written to.
        """
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
        new = [cell for cell in cells if id(cell) not in self._cells and self._reaches_cell(cell)]
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

    def _reaches_cell(self, cell: CellType) -> bool:
        return any(self._reaches(content) for content in _contents(cell))

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
