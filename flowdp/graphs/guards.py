"""Guards of recorded work: the state that it took from Python, compared before each replay.

A graph holds numbers, choices and tensors as they were when it was recorded. Watched are the modules, of the
model and of what the loss names: their attributes that are plain values or tensors, among them the training
flag; their parameters, buffers and submodules, with memory and `requires_grad`; hooks on them. And likewise
what the loss itself names: its closure, globals, arguments and object, one level deep. All other sources of
change show in a comparison with an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, ValuesView
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.graphs.base import PLAIN

__all__ = ["Guards", "hook_tables"]

TABLES = ("_parameters", "_buffers", "_modules")

_free = attrgetter("requires_grad")


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """The hooks of a module on its forward and backward: a dict for each kind."""
    return [hooks for name, hooks in vars(module).items() if name.endswith("_hooks") and "ward" in name]


class Guards:
    """Tells whether anything that recorded work depends on has changed.

    Args:
        module: The module.
        loss: The function of the step, or the module's own forward.

    Attributes:
        state: Parameters, buffers and other tensors that are watched: the work may write to them.

    Threads: the rank's.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        self._module = module
        self._loss = loss
        self.retake()

    def retake(self) -> None:
        """Take the state anew, as it is now."""
        self._names: list[str] = []  # of the tables of plain values
        self._tables: list[Mapping[Any, Any]] = []
        self._picks: list[Callable[[Any], Any]] = []
        self._cells: list[CellType] = []
        self._held: list[tuple[Mapping[Any, Any], Any]] = []  # other tensors: table and key
        # Parameters, buffers and submodules; and tables to which nothing may be added, those of hooks among
        # them. Most of both are empty, and one `any` tells that they still are.
        self._homes: list[ValuesView[Any]] = []
        self._sized: list[Mapping[Any, Any]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._seen: set[int] = set()
        self._watch("the model", self._module)
        for name, value in _named(self._loss):
            self._watch(name, value)
            if isinstance(value, dict):
                self._table(name, value)
            if isinstance(value, (list, tuple, dict)):
                for item in list(value.values() if isinstance(value, dict) else value):
                    self._watch(name, item)
        for space, names in _spaces(self._loss):
            self._table("a global of the loss", space, names)
        self._cells = [cell for function in _functions(self._loss) for cell in function.__closure__ or ()]
        entries = chain.from_iterable(self._homes)
        held = [table[key] for table, key in self._held] + [_content(cell) for cell in self._cells]
        tensors = {id(one): one for one in (*entries, *held) if isinstance(one, Tensor)}
        self.state = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        self._values = self._look()
        self._kept = self._objects()

    def changed(self) -> str | None:
        """Something that has changed, in words; None where nothing has."""
        try:
            if not any(self._empty) and self._look() == self._values:
                kept = self._objects()
                if len(kept) == len(self._kept) and all(map(is_, kept, self._kept)):
                    return None
            for name, pick, table, before in zip(
                self._names, self._picks, self._tables, self._values[0], strict=True
            ):
                if pick(table) != before:
                    return f"the values of {name} were {before}, they are {pick(table)}"
        except Exception:  # an attribute is gone, or a tensor in the place of a number
            return "an attribute is gone, or of another type"
        return "a layer, parameter, buffer or hook, its memory or requires_grad"

    def _look(self) -> tuple[list[Any], ...]:
        """All that is compared by value."""
        return (
            [*map(call, self._picks, self._tables)],
            [*map(len, self._sized)],
            [*map(_free, self.state), *map(Tensor.data_ptr, self.state)],
            [value for cell in self._cells if isinstance(value := _content(cell), PLAIN)],
        )

    def _objects(self) -> list[Any]:
        """All that is compared by identity."""
        return [
            *chain.from_iterable(self._homes),
            *(table.get(key) for table, key in self._held),
            *(value for cell in self._cells if not isinstance(value := _content(cell), PLAIN)),
        ]

    def _watch(self, name: str, value: Any) -> None:
        """Watch a module with its parts, or the attributes of another object."""
        if id(value) in self._seen or isinstance(
            value, (type, ModuleType, FunctionType, MethodType, partial)
        ):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            for part_name, part in value.named_modules():
                self._seen.add(id(part))
                self._table(f"{part_name or type(part).__name__}", vars(part))
                homes, hooks = [vars(part)[key] for key in TABLES], hook_tables(part)
                self._homes += [home.values() for home in homes if home]
                self._sized += filter(None, hooks)
                self._empty += [table for table in (*homes, *hooks) if not table]
        elif not isinstance(value, Tensor) and isinstance(getattr(value, "__dict__", None), dict):
            self._table(name, vars(value))

    def _table(self, name: str, table: Mapping[Any, Any], names: Any = None) -> None:
        """Watch the plain values and tensors of a table."""
        chosen = [key for key in (names or table) if key in table]
        keys = [key for key in chosen if isinstance(table[key], PLAIN)]
        if names is None:
            self._sized.append(table)
        self._names.append(name)
        self._tables.append(table)
        self._picks.append(itemgetter(*keys) if keys else lambda _: ())
        self._held += [(table, key) for key in chosen if isinstance(table[key], Tensor)]


def _functions(loss: Any) -> Iterator[FunctionType]:
    """The function of a loss, and those that its closure and arguments hold."""
    todo, seen = [loss], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            todo.append(value.__func__)
        elif isinstance(value, FunctionType):
            yield value
            todo += [_content(cell) for cell in value.__closure__ or ()]


def _named(loss: Any) -> Iterator[tuple[str, Any]]:
    """The object, arguments, closure and globals of a loss, by name."""
    inner = loss
    while isinstance(inner, partial):
        yield from ((f"{name!r} of the loss", value) for name, value in inner.keywords.items())
        yield from (("an argument of the loss", value) for value in inner.args)
        inner = inner.func
    yield "the loss", getattr(inner, "__self__", inner)
    for function in _functions(loss):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values = [(name, _content(cell)) for name, cell in cells]
        space = function.__globals__
        values += [(name, space[name]) for name in function.__code__.co_names if name in space]
        for name, value in values:
            yield f"{name!r} of the loss", value
            if isinstance(value, MethodType):
                yield f"the object of {name!r}", value.__self__


def _spaces(loss: Any) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The globals of a loss and of the functions in its closure, and the names that are read there."""
    return ((function.__globals__, function.__code__.co_names) for function in _functions(loss))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
