"""Schedule of a form of step: recorded, compared with an eager one, recorded anew, given up."""

from __future__ import annotations

from typing import Literal

from flowdp.policy.recheck import is_due_at

__all__ = ["CapturePlan", "FormPlan"]

Action = Literal["eager", "record", "run", "compare"]

WARM_UP = 2
"""Eager steps of a form before it is recorded: they allocate memory at first use."""

UNSTEADY = 4
"""Eager steps in a row that changed a watched value, after which no step is recorded."""

PAYS = 100
"""Steps that a graph must have run for its recording to have been worth it."""

FUTILE = 8
"""Graphs that ran fewer steps than that and became void, after which no other is recorded."""


class FormPlan:
    """The plan for steps of one form: structure, shapes and dtypes.

    Args:
        compare_every: Captured steps between two comparisons, at most.
    """

    def __init__(self, compare_every: int) -> None:
        self._every = compare_every
        self._seen = 0
        self.runs = 0
        self._is_recorded = False

    def next(self, *, is_steady: bool) -> Action:
        """Choose the action for the next step.

        Args:
            is_steady: The last eager step has changed nothing that is watched.
        """
        if self._is_recorded:
            self.runs += 1
            return "compare" if is_due_at(self.runs) or self.runs % self._every == 0 else "run"
        self._seen += 1
        return "record" if self._seen > WARM_UP and is_steady else "eager"

    def recorded(self) -> None:
        """A graph of this form is there."""
        self._is_recorded, self.runs = True, 0

    def void(self) -> int:
        """Discard the graph; returns the steps that it ran."""
        runs, self._is_recorded, self._seen = self.runs, False, WARM_UP - 1
        return runs if runs else PAYS


class CapturePlan:
    """The plan for all steps of one rank.

    Args:
        graphs: Forms that may be recorded.
        compare_every: See `FormPlan`.

    Attributes:
        forms: One for each form that has been seen, in order; at most `graphs`.
    """

    def __init__(self, graphs: int, compare_every: int) -> None:
        self._graphs = graphs
        self._every = compare_every
        self._unsteady = 0
        self._futile = 0
        self.forms: list[FormPlan] = []

    def add(self) -> FormPlan | None:
        """Another form has come; None: there are enough, and it stays eager."""
        if len(self.forms) == self._graphs:
            return None
        self.forms.append(FormPlan(self._every))
        return self.forms[-1]

    @property
    def is_steady(self) -> bool:
        """Whether the last eager step has changed nothing that is watched."""
        return self._unsteady == 0

    def stepped(self, *, has_changed: bool) -> bool:
        """An eager step has ended; returns whether steps change watched values, so that none is recorded."""
        self._unsteady = self._unsteady + 1 if has_changed else 0
        return self._unsteady >= UNSTEADY

    def changed(self) -> bool:
        """The graphs are void, for something has changed; returns whether that happens too often."""
        ran = [form.void() for form in self.forms]
        if ran and min(ran) < PAYS:
            self._futile += 1
        return self._futile >= FUTILE
