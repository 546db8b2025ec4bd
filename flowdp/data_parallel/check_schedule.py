"""Schedule of the comparisons that a function's calls get."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import nn

from flowdp.data_parallel.layout import Callee
from flowdp.policy.recheck import Recheck

__all__ = ["Schedule", "Schedules"]

MOST_FORMS = 16
"""Forms with a schedule of their own; all others have one in common, or outputs whose form changes with every
call would cost a comparison each."""


class Schedule:
    """Schedule of a function: the first, second, fourth, eighth call of each form, and so on.

    The form of a call is what is known before it (modes, arguments that are cut) and the form of its outputs.
    One comparison is not enough: a mean over tokens is one over samples until a batch is padded, and a branch
    that looks across the batch shows nothing while the parameter that weights it is 0.

    Attributes:
        callee: The function.
        told: What the log has had.
        is_alone: Whether it gives the right result in the calling thread alone.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.told: set[str] = set()
        self.is_alone = False
        self._calls: dict[Hashable, Recheck] = {}
        self._last: dict[Hashable, Hashable] = {}  # form of the last outputs, by what was known before

    def is_due(self, before: Hashable) -> bool:
        """Whether a call is to be compared, should its outputs have the form of the last."""
        return self._calls.get(self._key(before), Recheck()).is_due

    def is_due_after(self, before: Hashable, outputs: Hashable) -> bool:
        """Whether it is to be compared now that the form of its outputs is known, and is another one."""
        is_other = before in self._last and self._last[before] != outputs
        self._last[before] = outputs
        return is_other and self.is_due(before)

    def passed(self, before: Hashable) -> None:
        """Count the call: it went well, compared or not."""
        self._calls.setdefault(self._key(before), Recheck()).passed()

    def _key(self, before: Hashable) -> Hashable:
        key = before, self._last.get(before)
        return key if key in self._calls or len(self._calls) < MOST_FORMS else None


class Schedules:
    """The schedules of all functions that are called with a module, each made at its first call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Any, Schedule] = {}

    def of(self, function: str | Callable[..., Any]) -> Schedule:
        """The schedule of a method's name, or of a function of the module."""
        # A lambda is another object in every call, and its code is not.
        own = function.func if isinstance(function, partial) else function
        key = own if isinstance(own, str) else getattr(own, "__code__", type(own))
        known = self._known.get(key)
        if known is None:
            if isinstance(function, str):
                callee = Callee(getattr(self._module, function, self._module.forward))
                callee.name = f"{type(self._module).__name__}.{function}"
            else:
                callee = Callee(function, skip=1)
            known = self._known[key] = Schedule(callee)
        return known
