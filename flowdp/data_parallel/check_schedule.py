"""Schedule of the checks that a function's calls get."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from flowdp.data_parallel.layout import Callee
from flowdp.policy.recheck import Recheck

__all__ = ["Schedule", "Schedules"]

MOST_FORMS = 16
"""Most forms kept: outputs whose form changes with every call would cost a check each."""


@dataclass(slots=True)
class _Form:
    """Calls with the same modes of the submodules and the same `Outputs.form`."""

    modes: Hashable
    outputs: Any
    calls: Recheck = field(default_factory=Recheck)


class Schedule:
    """Schedule of a function's checks: at the first, second, fourth, eighth call of each form, and so on.

    The form of a call is that of its outputs, and which submodules are in training mode. One check is not
    enough: a mean over tokens is one over samples until a batch is padded, and a branch that looks across
    the batch shows nothing while the parameter that weights it is 0.

    Attributes:
        callee: The function.
        graphs: Schedule of the look through a call's graph for gradients that would be lost.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.graphs = Recheck()
        self._modes: Hashable = None
        self._forms: list[_Form] = []
        self._others = _Form(None, None)  # of all forms beyond those
        self._last: dict[Hashable, _Form] = {}  # by modes
        self._untried: set[Hashable] = set()
        self._is_checked = False

    def give_up(self) -> None:
        """Check no more in these modes: the function cannot be tried."""
        self._untried.add(self._modes)

    def is_due(self, modes: Hashable) -> bool:
        """Whether a call that is cut is to be checked, should its outputs have the form of the last.

        In other `modes` of the submodules the function may do something else.
        """
        self._modes = modes if modes in self._last or len(self._last) < MOST_FORMS else None
        last = self._last.get(self._modes)
        self._is_checked = self._modes not in self._untried and (last is None or last.calls.is_due)
        return self._is_checked

    def is_still_due(self, outputs: Any) -> bool:
        """Whether the call is to be checked now that the form of its outputs is known, and was not before."""
        form = self._last.get(self._modes)
        if form is None or form.outputs != outputs:
            form = self._last[self._modes] = self._form(outputs)
        return not self._is_checked and self._modes not in self._untried and form.calls.is_due

    def passed(self) -> None:
        """Count the call: it went well, checked or not."""
        self._last[self._modes].calls.passed()

    def _form(self, outputs: Any) -> _Form:
        for known in self._forms:
            if known.modes == self._modes and known.outputs == outputs:
                return known
        if len(self._forms) == MOST_FORMS:
            return self._others
        self._forms.append(_Form(self._modes, outputs))
        return self._forms[-1]


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
