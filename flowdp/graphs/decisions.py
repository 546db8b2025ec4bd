"""Decisions about recorded work, for the steps of a Trainer and the calls of a loop alike.

Whether it pays to record it; when work of a form runs eagerly, is recorded, replayed, or compared with eager
work; and when recording ends, after which all is eager.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from flowdp.graphs.base import NotCaptured
from flowdp.graphs.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.policy.schedule import is_due_at
from flowdp.policy.worth import FUTILE, PAYS, WARM_UP, LaunchWatch

__all__ = ["Decisions", "Form", "LogOnce"]

Action = Literal["eager", "run", "compare"]

log = logging.getLogger("flowdp")

G = TypeVar("G")


class LogOnce:
    """Log of texts, each once.

    Args:
        is_chosen: Whether the user has asked for capture: then all are warnings.
        name: Begins each text.

    Threads: any.
    """

    def __init__(self, is_chosen: bool, name: str = "") -> None:
        self._level = logging.WARNING if is_chosen else logging.INFO
        self._start = f"capture: {name}: " if name else "capture: "
        self._lock = threading.Lock()
        self._texts: set[str] = set()

    def __call__(self, text: str, *, is_shown: bool = False) -> None:
        """Log a text; one that the user has to see is a warning in any case."""
        with self._lock:
            is_new = text not in self._texts
            self._texts.add(text)
        if is_new:
            log.log(logging.WARNING if is_shown else self._level, "%s%s", self._start, text)


@dataclass(slots=True, eq=False)
class Form(Generic[G]):
    """Work of one form, and the graph for it.

    Attributes:
        specs: Modes; shape, strides and dtype of each tensor, and the values of other leaves.
        tree: How the leaves make a batch, or arguments.
        seen: Eager runs of this form.
        runs: Runs since the graph was recorded.
        graph: Once it is recorded.
    """

    specs: tuple[Any, ...]
    tree: object
    seen: int = 0
    runs: int = 0
    graph: G | None = None


class Decisions(Generic[G]):
    """Decides for each piece of work whether a recorded graph runs.

    Args:
        noun: "step" or "call", for the log.
        options: Options of the user.
        guard: Makes the guards of the state that the work reads.
        tell: Logs a text that has not been logged: a `LogOnce`.
        watch: Tells whether capture pays; None: work is captured in any case.

    Attributes:
        ended: Why the work runs eagerly from now on; None: it is captured, or will be.
        problem: The same, where the user has asked for capture, or a graph was wrong.
        watch: As given.
        guards: Once capture has begun.
        forms: Those that have been seen; at most `options.graphs`.

    Threads:
        One at a time. `ended`, `problem`, `forms`: any.
    """

    def __init__(
        self,
        noun: str,
        options: CaptureOptions,
        guard: Callable[[], Guards],
        tell: Callable[..., None],
        watch: LaunchWatch | None,
    ) -> None:
        self.ended: str | None = None
        self.problem: str | None = None
        self.watch = watch
        self.guards: Guards | None = None
        self.forms: list[Form[G]] = []
        self._noun = noun
        self._options = options
        self._guard = guard
        self._tell = tell
        self._runs = 0  # of graphs since something has changed
        self._futile = 0

    @property
    def has_graphs(self) -> bool:
        """Whether there is a graph."""
        return any(form.graph is not None for form in list(self.forms))

    def begins(self, device: object) -> bool:
        """Whether work is captured from here on; ends it where that would not be faster."""
        watch = self.watch
        if self.guards is not None:
            return True
        if watch is not None:
            if watch.is_behind is None:
                return False
            if not watch.is_behind:
                self.end(
                    f"{device} takes {watch.device_ms:.3g} ms for the kernels of a {self._noun}, and the "
                    f"host {watch.launch_ms:.3g} ms to launch them"
                )
                return False
            self._tell(
                f"{device} waits for launches, {watch.launch_ms:.3g} ms a {self._noun}: "
                f"{self._noun}s run as CUDA graphs from now on, without the user's Python (capture=False "
                "leaves them eager)",
                is_shown=True,
            )
        self.guards = self._guard()
        return True

    def form(self, specs: tuple[Any, ...], tree: object) -> Form[G] | None:
        """The form of work; None: there are enough, and it stays eager."""
        for form in self.forms:
            if form.specs == specs and form.tree == tree:
                return form
        if len(self.forms) == self._options.graphs:
            self._tell(
                f"{self._noun}s come in more than {len(self.forms)} forms (shapes, dtypes, "
                "numbers), and those of others run eagerly"
            )
            return None
        self.forms.append(Form(specs, tree))
        return self.forms[-1]

    def next(self, form: Form[G], record: Callable[[], G]) -> Action:
        """The action for work of a form; a graph that is due is recorded by `record`.

        A form that has just been recorded is compared.
        """
        assert self.guards is not None
        if (change := self.guards.changed()) is not None:
            self._void(change)
            return "eager"
        if form.graph is None:
            form.seen += 1
            if form.seen <= WARM_UP:
                return "eager"
            try:
                form.graph, form.runs = record(), 0
            except NotCaptured as reason:
                self.end(str(reason))
                return "eager"
        form.runs += 1
        self._runs += 1
        return "compare" if is_due_at(form.runs, self._options.compare_every) else "run"

    def end(self, reason: str, *, differs: bool = False) -> None:
        """Run all eagerly from here on.

        Args:
            reason: For the log.
            differs: Whether a graph has done something else than Python.
        """
        self.ended = reason
        if differs or self.watch is None:
            self.problem = reason
        self.drop()
        how = "go on eagerly, from the eager result" if differs else "run eagerly"
        is_told = self.watch is not None and self.guards is not None  # that they are captured
        self._tell(f"{self._noun}s {how}: {reason}", is_shown=differs or is_told)

    def drop(self) -> None:
        """Let go of all graphs."""
        for form in self.forms:
            form.graph, form.seen = None, 1

    def check(self, failure: str) -> None:
        """End it by what a comparison has found; "": nothing."""
        if failure and self.ended is None:
            reason = f"a captured {self._noun} differs from an eager one: {failure}"
            self.end(reason, differs=True)

    def _void(self, change: str) -> None:
        """Drop all graphs: something that they depend on has changed."""
        assert self.guards is not None
        had_graphs = self.has_graphs
        self._futile += self._runs < PAYS
        self._runs = 0
        self.drop()
        self.guards.retake()
        if self._futile >= FUTILE:
            self.end(
                f"the state that a {self._noun} depends on changes too often, the last time: {change}. A "
                "number that changes may be a tensor on the device, which is written to in place"
            )
        elif had_graphs:
            self._tell(f"{change}; the {self._noun} is captured anew")
