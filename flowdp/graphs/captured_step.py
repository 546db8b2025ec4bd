"""Captured steps: when a recorded graph replaces the user's Python, and checks that it computes the same.

A `Captured` stands between a rank and its forward and backward. It decides, for each micro-batch, whether
a recorded graph runs or the user's Python does, and compares the two now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowdp.data.batches import Gathered, made
from flowdp.data.trees import flatten
from flowdp.device.accelerator import device_generator
from flowdp.graphs.base import Capturable, Computed, Factors, NotCaptured, TrialStep
from flowdp.graphs.cuda_graph import CudaGraphs, CudaStepGraph
from flowdp.graphs.guards import Guards
from flowdp.graphs.trials import difference, spec_of
from flowdp.options import CaptureOptions
from flowdp.policy.capture_plan import FUTILE, CapturePlan, FormPlan, LaunchWatch
from flowdp.policy.formats import format_error

__all__ = ["CAPTURED", "Captured"]

CAPTURED = "captured"
"""State of steps that run as graphs."""


class Captured:
    """Decides for each micro-batch of a rank whether a recorded graph runs; see the module.

    Args:
        step: Forward and backward to capture.
        options: Options of the run.
        guard: Makes the guards of the state that the step reads.
        make: Makes the recorder, from the guards.
        tell: Logs a text that no other rank has logged; with `is_shown=True` as a warning in any case.
        watch: Tells whether capture pays; None: steps are captured in any case.

    Attributes:
        ended: Why the steps run eagerly from now on; None: they are captured, or will be.
        problem: The same, where the user has asked for captured steps, or one was wrong.
        is_running: Whether the last micro-batch was run by a graph.
        watch: As given.

    Threads:
        The rank's. `ended`, `problem`, `state`: any.
    """

    def __init__(
        self,
        step: Capturable,
        options: CaptureOptions,
        guard: Callable[[], Guards],
        make: Callable[[Guards], CudaGraphs],
        tell: Callable[..., None],
        watch: LaunchWatch | None = None,
    ) -> None:
        self.ended: str | None = None
        self.problem: str | None = None
        self.is_running = False
        self.watch = watch
        self._step = step
        self._plan = CapturePlan(options.graphs, options.compare_every)
        self._guard = guard
        self._make = make
        self._tell = tell
        self._forms: list[_Form] = []
        self._changes = 0  # steps in a row before which something has changed
        self._guards: Guards | None = None
        self._recorder: CudaGraphs | None = None

    @property
    def state(self) -> str:
        """The way in which steps run, in words."""
        if self.ended is not None:
            return f"eager: {self.ended}"
        if self._guards is None:
            return "eager: it is not known yet whether a captured step would be faster"
        return CAPTURED if any(form.graph is not None for form in self._forms) else "eager, to be captured"

    @property
    def is_expected(self) -> bool:
        """Whether it is known that steps are captured, in a moment or already."""
        return self.ended is None and (self.watch is None or bool(self.watch.is_behind))

    def run(self, batch: Any, worker: Any, factors: Factors) -> Computed | None:
        """Forward and backward of a micro-batch; None: nothing was done, and it is to be done eagerly.

        Args:
            batch: The micro-batch.
            worker: Worker of the step.
            factors: Factors of the micro-batch.

        Raises:
            Exception: As of an eager one, with a note; its type may be another.
        """
        self.is_running = False
        if self.ended is not None or not self._step.has_stepped:
            return None
        if self._guards is None:
            if not self._pays():
                return None
            self._guards = self._guard()
            self._recorder = self._make(self._guards)
            if self._guards.obstacle is not None:
                self._end(self._guards.obstacle)
                return None
        elif (change := self._guards.changed()) is not None:
            self._changes += 1
            self._void(change)
            return None if self.ended else self._eager(batch, worker, factors)
        self._changes = 0
        form = self._form_of(batch, worker.samples, factors)
        if form is None:
            return None
        action = form.plan.next(is_steady=self._plan.is_steady)
        if action == "eager":
            return self._eager(batch, worker, factors)
        tensors = _tensors(batch)
        if action == "record":
            if not self._record(form, batch, tensors, worker, factors):
                return None
            action = form.plan.next(is_steady=True)
        assert form.graph is not None
        if action == "compare":
            return self._compare(form.graph, batch, tensors, worker, factors)
        try:
            computed = form.graph.run(tensors, factors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            error.add_note("This step ran as a recorded graph; with capture=False the error names its line.")
            raise
        self.is_running = True
        for (name, weight), value in zip(form.graph.records, computed.scalars, strict=True):
            worker.sink(name, value, weight)
        return computed

    def close(self) -> None:
        """Free all graphs and their memory."""
        self._forms.clear()
        if self._recorder is not None:
            self._recorder.forget()

    def _pays(self) -> bool:
        """Whether it is known that captured steps would be faster; ends it where they would not."""
        watch = self.watch
        if watch is None:
            return True
        if watch.is_behind is None:
            return False
        if not watch.is_behind:
            self._end(
                f"{self._step.lane.device} takes {watch.device_ms:.3g} ms for its kernels, and the host "
                f"{watch.launch_ms:.3g} ms to launch them"
            )
            return False
        self._tell(
            f"capture: {self._step.lane.device} waits for launches, {watch.launch_ms:.3g} ms a step: steps "
            "run as CUDA graphs from now on, without the loss in Python (capture=False leaves them eager)",
            is_shown=True,
        )
        return True

    def _eager(self, batch: Any, worker: Any, factors: Factors) -> Computed:
        assert self._guards is not None
        computed = self._step.compute(made(batch), worker, factors)
        change = self._guards.changed()
        if change is not None:
            self._guards.retake()
        if self._plan.stepped(has_changed=change is not None):
            self._end(f"each step changes Python's state, which a captured one would not do ({change})")
        return computed

    def _form_of(self, batch: Any, samples: int, factors: Factors) -> _Form | None:
        """The form of a micro-batch; None: it has no graph, and gets none."""
        modes = torch._C._len_torch_dispatch_stack()  # another one might do something else
        tree: object
        try:
            if isinstance(batch, Gathered):
                tree, leaves = batch.make, [batch.index]
            else:
                leaves, tree = flatten(batch)
            is_whole, adds = factors.share == 1.0, self._step.has_begun
            specs = (
                samples,
                is_whole,
                adds,
                self._step.casts,
                modes,
                *(spec_of(leaf, "the batch") for leaf in leaves),
            )
        except NotCaptured as reason:
            self._end(str(reason))
            return None
        for form in self._forms:
            if form.specs == specs and form.tree == tree:
                return form
        plan = self._plan.add()
        if plan is None:
            self._tell(
                f"capture: batches come in more than {len(self._forms)} forms (shapes, dtypes, numbers), and "
                "those of others run eagerly; CaptureOptions(graphs=...) allows more"
            )
            return None
        self._forms.append(_Form(specs, tree, plan))
        return self._forms[-1]

    def _record(
        self,
        form: _Form,
        batch: Any,
        tensors: Sequence[Tensor],
        worker: Any,
        factors: Factors,
    ) -> bool:
        assert self._recorder is not None
        try:
            form.graph = self._recorder.record(batch, tensors, worker, factors)
        except NotCaptured as reason:
            self._end(str(reason))
            return False
        form.plan.recorded()
        return True

    def _compare(
        self,
        graph: CudaStepGraph,
        batch: Any,
        tensors: Sequence[Tensor],
        worker: Any,
        factors: Factors,
    ) -> Computed:
        """The step, taken eagerly beside a trial of the graph, which starts from the same state."""
        step = self._step
        generator = device_generator(step.lane.device)
        before = generator.get_state() if graph.draws else None
        after, trial, failure = None, None, ""
        try:
            trial = graph.trial(tensors, factors)
            after = generator.get_state() if graph.draws else None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = f"it raises {format_error(error)[:400]}"
        if before is not None:
            generator.set_state(before)
        told: list[tuple[str, float | Tensor, float]] = []
        if step.gradients is not None:
            step.gradients.begin()
        marks = [_mark(parameter) for parameter in step.trained]
        with _listening(worker, told):
            computed = self._eager(batch, worker, factors)
        if self.ended is not None:
            return computed
        if trial is not None:
            touched = [_mark(one) != mark for one, mark in zip(step.trained, marks, strict=True)]
            failure = self._difference(graph, trial, computed, told, touched)
        if not failure and after is not None and not torch.equal(after, generator.get_state()):
            failure = "it draws other random numbers"
        if failure:
            self._end(f"a captured step differs from an eager one: {failure}", differs=True)
        return computed

    def _difference(
        self,
        graph: CudaStepGraph,
        trial: TrialStep,
        computed: Computed,
        told: Sequence[tuple[str, float | Tensor, float]],
        touched: Sequence[bool],
    ) -> str:
        """The first difference of a trial from the eager step, in words; "" where there is none."""
        assert self._recorder is not None
        if [(name, weight) for name, _, weight in told] != list(graph.records):
            return "it records other numbers"
        module = self._step.module
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
            ("the loss", trial.computed.loss, computed.loss),
            ("the loss's weight", trial.computed.weight, computed.weight),
        ]
        for (name, value, _), mine in zip(told, trial.computed.scalars, strict=True):
            pairs.append((f"{name!r}", mine, torch.as_tensor(value)))
        names = {id(one): name for name, one in module.named_parameters()}
        for place, (parameter, gradient) in enumerate(zip(self._step.trained, trial.gradients, strict=True)):
            name = f"the gradient of {names[id(parameter)]!r}"
            if trial.touched[place] != touched[place]:
                return f"{name} is there in one of them alone"
            pairs.append((name, gradient, parameter.grad))
        for (name, buffer), mine in zip(module.named_buffers(), trial.buffers, strict=False):
            pairs.append((f"buffer {name!r}", mine, buffer))
        for name, one, other in pairs:
            if found := difference(one, other, self._recorder.bound):
                return f"{name} {found}"
        return ""

    def _void(self, change: str) -> None:
        assert self._guards is not None
        assert self._recorder is not None
        had_graphs = any(form.graph is not None for form in self._forms)
        for form in self._forms:
            form.graph = None
        self._recorder.forget()
        self._guards.retake()
        if self._plan.changed() or self._changes == FUTILE:
            self._end(
                f"the state that a step depends on changes too often, the last time: {change}. A number that "
                "changes may be a tensor on the device, which is written to in place"
            )
        elif had_graphs:
            self._tell(f"capture: {change}; the step is captured anew")

    def _end(self, reason: str, *, differs: bool = False) -> None:
        self.ended = reason
        if differs or self.watch is None:
            self.problem = reason
        self.close()
        how = "and goes on eagerly, from the eager result" if differs else "and runs eagerly"
        self._tell(f"capture: the step of this run is not captured {how}: {reason}", is_shown=differs)


@dataclass(slots=True)
class _Form:
    """A form of micro-batches, and the graph for it.

    Attributes:
        specs: Samples, place in the step, autocast and modes; shape, strides and dtype of each tensor, and
            the values of other leaves.
        tree: How the leaves make a batch.
        plan: Decides whether a step is recorded, replayed or compared.
        graph: Once it is recorded.
    """

    specs: tuple[Any, ...]
    tree: object
    plan: FormPlan
    graph: CudaStepGraph | None = None


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Gathered):
        return [batch.index]
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]


@contextmanager
def _listening(worker: Any, told: list[tuple[str, float | Tensor, float]]) -> Iterator[None]:
    sink = worker.sink

    def both(name: str, value: float | Tensor, weight: float) -> None:
        told.append((name, value, weight))
        sink(name, value, weight)

    worker.sink = both
    try:
        yield
    finally:
        worker.sink = sink


def _mark(parameter: Tensor) -> tuple[int, int]:
    """Mark of a gradient's state: a backward that adds to the gradient changes it."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
