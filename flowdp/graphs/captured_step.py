"""Captured steps: when a recorded graph replaces the user's Python, and checks that it computes the same.

A `Captured` stands between a rank and its forward and backward. For each micro-batch a recorded graph runs or
the user's Python does, and the two are compared now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.device.accelerator import device_generator, untried
from flowdp.device.gathered import Gathered, made
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.trees import flatten
from flowdp.errors import OptionError
from flowdp.graphs.base import Capturable, Computed, Factors, NotCaptured, TrialStep
from flowdp.graphs.cuda_graph import CudaGraphs, CudaStepGraph
from flowdp.graphs.decisions import Decisions, Form, LogOnce
from flowdp.graphs.guards import Guards
from flowdp.graphs.trials import Pair, first_difference, spec_of
from flowdp.options import CaptureOptions
from flowdp.policy.formats import format_error
from flowdp.policy.worth import LaunchWatch

__all__ = ["CAPTURED", "Capture", "Captured", "capture_steps"]

CAPTURED = "captured"
"""State of steps that run as graphs."""

Told = list[tuple[str, float | Tensor, float]]


class Captured(Decisions[CudaStepGraph]):
    """Decides for each micro-batch of a rank whether a recorded graph runs; see the module.

    Args:
        step: Forward and backward to capture.
        options: Options of the run.
        guard: Makes the guards of the state that the step reads.
        tell: See `Decisions`.
        watch: Tells whether capture pays; None: steps are captured in any case.

    Attributes:
        is_running: Whether the last micro-batch was run by a graph.

    Threads:
        The rank's. `ended`, `problem`, `state`: any.
    """

    is_running = False

    def __init__(
        self,
        step: Capturable,
        options: CaptureOptions,
        guard: Callable[[], Guards],
        tell: Callable[..., None],
        watch: LaunchWatch | None = None,
    ) -> None:
        super().__init__("step", options, guard, tell, watch)
        self._step = step
        self._graphs = CudaGraphs(step)

    @property
    def state(self) -> str:
        """The way in which steps run, in words."""
        if self.ended is not None:
            return f"eager: {self.ended}"
        if self.guards is None:
            return "eager: it is not known yet whether a captured step would be faster"
        return CAPTURED if self.has_graphs else "eager, to be captured"

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
        if self.ended is not None or not self._step.has_stepped or not self.begins(self._step.lane.device):
            return None
        form = self._form_of(batch, worker.samples, factors)
        if form is None:
            return None
        tensors = _tensors(batch)
        action = self.next(form, lambda: self._record(batch, tensors, worker, factors))
        if action == "eager":
            return None
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

    def drop(self) -> None:
        """Free all graphs and their memory."""
        super().drop()
        self._graphs.forget()

    def _form_of(self, batch: Any, samples: int, factors: Factors) -> Form[CudaStepGraph] | None:
        tree: object
        try:
            if isinstance(batch, Gathered):
                tree, leaves = batch.make, [batch.index]
            else:
                leaves, tree = flatten(batch)
            step, specs = self._step, [spec_of(leaf, "the batch") for leaf in leaves]
        except NotCaptured as reason:
            self.end(str(reason))
            return None
        return self.form((samples, factors.share == 1.0, step.has_begun, step.casts, *specs), tree)

    def _record(self, batch: Any, tensors: Sequence[Tensor], worker: Any, factors: Factors) -> CudaStepGraph:
        assert self.guards is not None
        return self._graphs.record(batch, tensors, worker, factors, self.guards.state)

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
        told: Told = []
        if step.gradients is not None:
            step.gradients.begin()
        marks = [_mark(parameter) for parameter in step.trained]
        with _listening(worker, told):
            computed = step.compute(made(batch), worker, factors)
        if trial is not None:
            touched = [_mark(parameter) != mark for parameter, mark in zip(step.trained, marks, strict=True)]
            failure = self._difference(graph, trial, computed, told, touched)
        if not failure and after is not None and not torch.equal(after, generator.get_state()):
            failure = "it draws other random numbers"
        self.check(failure)
        return computed

    def _difference(
        self,
        graph: CudaStepGraph,
        trial: TrialStep,
        computed: Computed,
        told: Told,
        touched: Sequence[bool],
    ) -> str:
        """The first difference of a trial from the eager step, in words; "" where there is none."""
        if [(name, weight) for name, _, weight in told] != list(graph.records):
            return "it records other numbers"
        module = self._step.module
        pairs: list[Pair] = [
            ("the loss", trial.computed.loss, computed.loss),
            ("the loss's weight", trial.computed.weight, computed.weight),
        ]
        for (name, value, _), mine in zip(told, trial.computed.scalars, strict=True):
            pairs.append((f"{name!r}", mine, torch.as_tensor(value)))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for place, (parameter, gradient) in enumerate(zip(self._step.trained, trial.gradients, strict=True)):
            name = f"the gradient of {names[id(parameter)]!r}"
            if trial.touched[place] != touched[place]:
                return f"{name} is there in one of them alone"
            pairs.append((name, gradient, parameter.grad))
        for (name, buffer), mine in zip(module.named_buffers(), trial.buffers, strict=False):
            pairs.append((f"buffer {name!r}", mine, buffer))
        return first_difference(pairs, self._graphs.bound)


Capture = Callable[[Capturable], Captured]
"""Makes the captured steps of a replica."""


def capture_steps(
    modules: Sequence[nn.Module],
    losses: Sequence[Callable[..., Any]],
    lanes: Sequence[Lane],
    options: CaptureOptions,
    *,
    is_chosen: bool,
) -> list[Capture | None]:
    """Makers of the captured steps of each rank's replica, of its model and its loss; None on other devices.

    Args:
        modules: The model of each rank.
        losses: The loss of each rank.
        lanes: The lane of each rank.
        options: Options of all ranks.
        is_chosen: Whether the user has asked for it; else steps are captured where that makes them faster.

    Raises:
        OptionError: It was asked for, and no rank's steps can be captured.
    """
    fit = [isinstance(lane, StreamLane) and untried(lane.device.type) is None for lane in lanes]
    if is_chosen and not any(fit):
        devices = ", ".join(dict.fromkeys(str(lane.device) for lane in lanes))
        raise OptionError(
            f"capture=True records steps as CUDA graphs, and the devices are {devices}; capture='auto' (the "
            "default) records them where there is a CUDA device and it pays"
        )
    tell = LogOnce(is_chosen)

    def make(model: nn.Module, loss: Callable[..., Any], step: Capturable) -> Captured:
        watch = None if is_chosen else LaunchWatch()
        return Captured(step, options, partial(Guards, model, loss), tell, watch)

    parts = zip(fit, modules, losses, strict=True)
    return [partial(make, model, loss) if is_fit else None for is_fit, model, loss in parts]


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Gathered):
        return [batch.index]
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]


@contextmanager
def _listening(worker: Any, told: Told) -> Iterator[None]:
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
