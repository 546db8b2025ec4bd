"""Schedule of the checks that a function's calls get."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from flowdp.engine.layout import Callee

__all__ = ["Schedule"]

MOST_FORMS = 16
"""Forms that are told apart: outputs whose form changes with every call would cost a check each."""


@dataclass(slots=True)
class _Form:
    """A kind of calls.

    Attributes:
        modes: Of the submodules.
        outputs: As `Outputs.form`.
        calls: Calls of this kind.
    """

    modes: Hashable
    outputs: Any
    calls: int = 0


class Schedule:
    """Which calls of a function are checked: the first, second, fourth, eighth of each form, and so on.

    The form of a call is that of its outputs, and which submodules are in training mode. One check is not
    enough: a mean over tokens is one over samples until a batch is padded, and a branch that looks across
    the batch shows nothing while the parameter that weights it is 0.

    Attributes:
        callee: The function.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self._graphs = 0  # calls with gradients
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

        Args:
            modes: Of the submodules: where they are others, the function may do something else.
        """
        self._modes = modes if modes in self._last or len(self._last) < MOST_FORMS else None
        last = self._last.get(self._modes)
        self._is_checked = self._is_on(1 if last is None else last.calls + 1)
        return self._is_checked

    def looks_at_graph(self) -> bool:
        """Count a call with gradients; whether to look through its graph: the first, second, fourth."""
        self._graphs += 1
        return _is_power_of_2(self._graphs)

    def has_seen(self, outputs: Any) -> bool:
        """Count a call by the form of its outputs; whether nothing is left to check."""
        form = self._last.get(self._modes)
        if form is None or form.outputs != outputs:
            form = self._last[self._modes] = self._form(outputs)
        form.calls += 1
        return self._is_checked or not self._is_on(form.calls)

    def _form(self, outputs: Any) -> _Form:
        for known in self._forms:
            if known.modes == self._modes and known.outputs == outputs:
                return known
        if len(self._forms) == MOST_FORMS:
            return self._others
        self._forms.append(_Form(self._modes, outputs))
        return self._forms[-1]

    def _is_on(self, calls: int) -> bool:
        return _is_power_of_2(calls) and self._modes not in self._untried


def _is_power_of_2(count: int) -> bool:
    return count & (count - 1) == 0
