"""Captured steps as decisions: whether they pay, and when one is recorded, compared, or recorded anew."""

from __future__ import annotations

from statistics import median
from typing import Literal

from flowdp.policy.recheck import is_due_at

__all__ = ["CapturePlan", "FormPlan", "LaunchWatch"]

Action = Literal["eager", "record", "run", "compare"]

WARM_UP = 2
"""Eager steps of a form before it is recorded: they allocate memory at first use."""

UNSTEADY = 4
"""Eager steps in a row that changed a watched value, after which no step is recorded."""

PAYS = 100
"""Steps that a graph must have run for its recording to have been worth it."""

FUTILE = 8
"""Graphs that ran fewer steps than that and became void, after which no other is recorded."""

WATCHED = 50
"""Steps that are watched before it is decided whether a run's are captured."""

SETTLED = 10
"""The first of these do not count: they load kernels and allocate."""

BESIDE = 1.1
"""A device that ends a step at most this much later than the host has launched it had been waiting for it."""


class LaunchWatch:
    """Tells whether the host is behind its device: whether a step's launches take longer than its kernels.

    A device that waits for launches ends a step as soon as the last one has come, so it takes as long as the
    host. One with enough to do takes longer.

    Attributes:
        is_behind: Whether the host is, in most steps; None: too few have been seen.
        launch_ms: Median time of the host for a step, once that is known.
        device_ms: Median time of the device for a step, likewise.
    """

    def __init__(self) -> None:
        self.is_behind: bool | None = None
        self.launch_ms = self.device_ms = 0.0
        self._seen: list[tuple[float, float]] = []

    def take(self, launch_ms: float, device_ms: float) -> None:
        """Take the times of an eager step, on the host and on the device."""
        if self.is_behind is not None:
            return
        self._seen.append((launch_ms, device_ms))
        if len(self._seen) < WATCHED:
            return
        seen = self._seen[SETTLED:]
        self.is_behind = 2 * sum(device <= BESIDE * launch for launch, device in seen) > len(seen)
        self.launch_ms, self.device_ms = (median(times) for times in zip(*seen, strict=True))
        self._seen.clear()


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
