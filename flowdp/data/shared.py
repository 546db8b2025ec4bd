"""Turns for sources whose datasets could share an object: an open file, a cache, a part of a split.

Two threads that seek and read one file get wrong samples without an error. So a source looks for the objects
that its dataset reaches, and reads in turns with every earlier source that reaches one of them. Datasets with
nothing in common are read side by side, and one that hangs holds up no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from flowdp.threads.turns import Turns

__all__ = ["MOST_ENTRIES", "MOST_OBJECTS", "ReadingTurns", "reachable"]

MOST_OBJECTS = 100_000
"""Objects that are looked at; a dataset that reaches more takes turns with all others."""

MOST_ENTRIES = 10_000
"""Entries of one container that are looked at; a longer one, of paths or rows, counts as one object."""

_VALUES = (type(None), bool, int, float, complex, str, bytes, PurePath, torch.dtype, torch.device, torch.Size)
_STATELESS = (type, ModuleType, BuiltinFunctionType)
_ARRAYS = (Tensor, np.ndarray, np.generic)  # may be read by any number of threads


def reachable(*roots: object) -> frozenset[int] | None:
    """Identities of the objects that these reach and that threads could disturb each other in.

    Attributes, containers, closures and default arguments are followed; globals are not.

    Returns:
        None where there are more than `MOST_OBJECTS`.
    """
    seen: set[int] = set()
    found: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        value = todo.pop()
        if isinstance(value, (*_VALUES, *_STATELESS, *_ARRAYS)) or id(value) in seen:
            continue
        if len(seen) >= MOST_OBJECTS:
            return None
        seen.add(id(value))
        if not isinstance(value, (FunctionType, MethodType, tuple, frozenset)):
            found.add(id(value))
        todo += _inside(value)
    return frozenset(found)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        if len(value) <= MOST_ENTRIES:
            yield from list(value)
            yield from list(value.values()) if isinstance(value, dict) else ()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # empty
                yield cell.cell_contents
    else:
        yield from list(getattr(value, "__dict__", {}).values())
        slots = (name for kind in type(value).__mro__ for name in _slots(kind))
        yield from (getattr(value, name) for name in slots if hasattr(value, name))


def _slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


_numbers = count()
_registered = threading.Lock()
_live: WeakValueDictionary[int, ReadingTurns] = WeakValueDictionary()


class ReadingTurns:
    """The turn that a source takes around every call of its dataset's own code.

    Of two sources that reach a common object, both take the turn of the one that was made first; all take
    them in the order in which the sources were made, so none waits for another in a circle.

    Args:
        roots: The dataset, and whatever else runs with it.

    Threads:
        Made in any thread; `begin` and `end` in the reader's; the others in any.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots  # kept, or another object could get an identity of theirs
        self._reached = reachable(*roots)
        self._own = Turns()
        with _registered:
            earlier = [turns._own for _, turns in sorted(_live.items()) if self._meets(turns)]
            self._turns = (*earlier, self._own)
            _live[next(_numbers)] = self

    def _meets(self, other: ReadingTurns) -> bool:
        if self._reached is None or other._reached is None:
            return True
        return not self._reached.isdisjoint(other._reached)

    def begin(self, gives_up: Callable[[], bool]) -> bool:
        """Wait for the turn; see `Turns.begin`."""
        for taken, turns in enumerate(self._turns):
            if not turns.begin(gives_up):
                for one in reversed(self._turns[:taken]):
                    one.end()
                return False
        return True

    def end(self) -> None:
        """Give the turn to the next; see `Turns.end`."""
        for turns in reversed(self._turns):
            turns.end()

    def look(self) -> None:
        """Have waiting threads ask again whether they give up."""
        for turns in self._turns:
            turns.look()

    def take_away(self, thread: threading.Thread) -> None:
        """Pass the turn on if this thread has it; see `Turns.take_away`."""
        for turns in self._turns:
            turns.take_away(thread)
