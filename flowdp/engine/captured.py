"""Captured steps: forward and backward of a rank as a recorded graph that runs without the interpreter lock.

A `Captured` stands between a replica and its forward and backward. It decides, for each micro-batch, whether
a recorded graph runs or the user's Python does; a `Recorder` makes the graphs, one for each kind of device:
on the CPU `step_graph`, on CUDA `cuda_graph`. Both record `replica.weigh(replica._forward(batch, worker),
share, of)` and its gradients, inside of `watching(worker)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from flowdp.data.trees import Form, flatten
from flowdp.device.draws import OwnDraws, draw_seed
from flowdp.engine import context
from flowdp.engine.context import CurrentWorker
from flowdp.engine.guards import Guards
from flowdp.options import CaptureOptions
from flowdp.policy.capture_plan import CapturePlan, FormPlan
from flowdp.policy.formats import format_error

if TYPE_CHECKING:
    from flowdp.engine.replica import Replica

__all__ = [
    "Captured",
    "Computed",
    "Factors",
    "NotCaptured",
    "Recorder",
    "StepGraph",
    "Trial",
    "Watched",
    "watching",
]

FREE = frozenset({"rank", "device", "model", "samples", "record", "sink"})
"""What a loss may ask its worker: it is the same in every step of a graph."""


class NotCaptured(Exception):
    """A step that cannot be recorded; the text is a sentence for the log."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The numbers of a micro-batch that differ from step to step, and so are inputs of a graph.

    Attributes:
        share: Of its loss in that of the step.
        of: Samples of the rank's part of a window (exact); else those of the micro-batch.
    """

    share: float
    of: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of one forward and backward, beside the gradients and buffers.

    Attributes:
        loss: Times its share, detached. Shape []. Memory that no later run of the graph writes to.
        weight: Of the loss, where it names one (exact). Float64, shape [].
        scalars: Recorded values, in the order of the graph's `records`; an eager step has passed them on.
    """

    loss: Tensor
    weight: Tensor | None = None
    scalars: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a graph's run that has changed nothing.

    Attributes:
        computed: See there.
        gradients: Of each trained parameter behind the run, in the order of the module; None: it has none.
        buffers: Of the module behind the run, in its order.
        touched: Whether the graph adds to the gradient of each trained parameter: torch steps no other.
    """

    computed: Computed
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]
    touched: Sequence[bool]


class StepGraph(Protocol):
    """Forward and backward of micro-batches of one form.

    Attributes:
        records: Name and weight of each recorded scalar.
        draws: Whether it draws random numbers.
    """

    records: Sequence[tuple[str, float]]
    draws: bool

    def run(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Computed:
        """Add to the parameters' gradients, and update the buffers in place.

        Args:
            leaves: The tensors of the micro-batch, in the order of its tree.
            factors: Of the micro-batch.
            generator: Random numbers are drawn from it; None: from the device's own.

        Streams:
            On the lane's `compute`, which is the current one; nothing is read back.
        """
        ...

    def trial(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Trial:
        """Run beside the step: gradients and buffers are as before when it returns. Arguments as of `run`.

        The caller puts the generator back.
        """
        ...


class Recorder(Protocol):
    """Makes the graphs of one replica; one per kind of device.

    Attributes:
        bound: Largest difference between a captured step and an eager one, relative to the largest value of
            the compared tensor; 0: equal bits.
    """

    bound: float

    def record(
        self, batch: Any, leaves: Sequence[Tensor], worker: CurrentWorker, factors: Factors
    ) -> StepGraph:
        """Record forward and backward of this micro-batch; state of the replica is left as it was.

        Args:
            batch: The micro-batch.
            leaves: Its tensors.
            worker: Whose step it is.
            factors: Of the micro-batch.

        Raises:
            NotCaptured: It cannot be recorded.
        """
        ...

    def step(self, factor: float) -> bool:
        """Take the optimizer's step by a graph of its own; False: there is none, and it is taken eagerly.

        Args:
            factor: On loss and gradients; see `Replica.step`.
        """
        ...

    def forget(self) -> None:
        """The graphs are of no use any more, for something has changed: let their memory go."""
        ...


@dataclass(slots=True)
class Watched:
    """The numbers that a loss has recorded while it was watched.

    Attributes:
        records: Name and weight of each.
        values: The tensors.
    """

    records: list[tuple[str, float]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def take(self, name: str, value: float | Tensor, weight: float) -> None:
        """Take a number; the `sink` of a worker.

        Raises:
            NotCaptured: It is no tensor, and so would be the same in every step.
        """
        if not isinstance(value, Tensor):
            raise NotCaptured(
                f"the loss records a number of Python under {name!r}, which a captured step would repeat as "
                "it is: record a tensor"
            )
        self.records.append((name, weight))
        self.values.append(value.detach())


class _Asked:
    """Stands for a worker while its loss is recorded, and refuses what changes from step to step."""

    def __init__(self, worker: CurrentWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        if name not in FREE:
            raise NotCaptured(
                f"the loss reads current_worker().{name}, which a captured step would read once and for all"
            )
        return getattr(self._worker, name)


@contextmanager
def watching(worker: CurrentWorker) -> Iterator[Watched]:
    """Record a loss: numbers go into the result, and reading the state of the step raises `NotCaptured`.

    Threads:
        The worker's.
    """
    seen = Watched()
    sink, worker.sink = worker.sink, seen.take
    try:
        with context.bound(_Asked(worker)):  # type: ignore[arg-type]
            yield seen
    finally:
        worker.sink = sink


class Captured:
    """Decides for each micro-batch of a replica whether a recorded graph runs; see the module.

    Args:
        replica: Whose.
        options: Of the run.
        modules: All that the step reads, by name: the replica's, and those that the loss holds.
        make: Makes the recorder, of the guards.
        tell: Logs a text that no other rank has logged.

    Attributes:
        ended: Why the steps run eagerly from now on; None: they are captured, or will be.
        is_running: Whether the last micro-batch was run by a graph.

    Threads:
        The rank's worker. `ended`: any.
    """

    def __init__(
        self,
        replica: Replica,
        options: CaptureOptions,
        modules: Mapping[str, nn.Module],
        make: Callable[[Guards], Recorder],
        tell: Callable[[str], None],
    ) -> None:
        self.ended: str | None = None
        self.is_running = False
        self._replica = replica
        self._plan = CapturePlan(options.graphs, options.compare_every)
        self._modules = modules
        self._make = make
        self._tell = tell
        self._forms: list[_Form] = []
        self._guards: Guards | None = None
        self._recorder: Recorder | None = None

    def run(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed | None:
        """Forward and backward of a micro-batch; None: nothing was done, and it is to be done eagerly.

        Raises:
            Exception: As of an eager one, with a note; its type may be another.
        """
        self.is_running = False
        if self.ended is not None or not self._replica.has_stepped:
            return None
        if self._guards is None:
            self._guards = Guards(self._modules, self._replica._loss)
            self._recorder = self._make(self._guards)
            if self._guards.iterator is not None:
                self._end(
                    f"{self._guards.iterator} is an iterator, from which a captured step would not take"
                )
                return None
        elif (change := self._guards.changed()) is not None:
            self._void(change)
            return None if self.ended else self._eager(batch, worker, factors)
        leaves, tree = flatten(batch)
        form = self._form_of(leaves, tree, worker.samples)
        if form is None:
            return None
        action = form.plan.next(is_steady=self._plan.is_steady)
        if action == "eager":
            return self._eager(batch, worker, factors)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if action == "record":
            if not self._record(form, batch, tensors, worker, factors):
                return None
            action = form.plan.next(is_steady=True)
        assert form.graph is not None
        if action == "compare":
            return self._compare(form.graph, batch, tensors, worker, factors)
        draws = self._replica.draws
        try:
            computed = form.graph.run(tensors, factors, None if draws is None else draws.generator)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            error.add_note("This step ran as a recorded graph; with capture=False the error names its line.")
            raise
        self.is_running = True
        for (name, weight), value in zip(form.graph.records, computed.scalars, strict=True):
            worker.sink(name, value, weight)
        return computed

    def step(self, factor: float) -> bool:
        """See `Recorder.step`."""
        return self.ended is None and self._recorder is not None and self._recorder.step(factor)

    def _eager(self, batch: Any, worker: CurrentWorker, factors: Factors) -> Computed:
        assert self._guards is not None
        computed = self._replica.compute(batch, worker, factors)
        change = self._guards.changed()
        if change is not None:
            self._guards.retake()
        if self._plan.stepped(has_changed=change is not None):
            self._end(f"each step changes Python's state, which a captured one would not do ({change})")
        return computed

    def _form_of(self, leaves: Sequence[Any], tree: Form, samples: int) -> _Form | None:
        try:
            specs = samples, *map(_spec, leaves)
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
        self, form: _Form, batch: Any, tensors: Sequence[Tensor], worker: CurrentWorker, factors: Factors
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
        graph: StepGraph,
        batch: Any,
        tensors: Sequence[Tensor],
        worker: CurrentWorker,
        factors: Factors,
    ) -> Computed:
        """The step, taken eagerly beside a trial of the graph, which starts from the same state."""
        replica, draws = self._replica, self._replica.draws
        scope: AbstractContextManager[Any] = nullcontext()
        if draws is None and graph.draws and replica.shares_generator and replica.device.type == "cpu":
            # Other ranks draw from torch's generator meanwhile.
            scope = draws = OwnDraws(draw_seed(), replica.flat.rank)
        generator = None if draws is None else draws.generator
        if generator is None:
            generator = _generator(replica.device)
        before = generator.get_state() if graph.draws else None
        after, trial, failure = None, None, ""
        try:
            trial = graph.trial(tensors, factors, None if draws is None else generator)
            after = generator.get_state() if graph.draws else None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            failure = f"it raises {format_error(error)[:400]}"
        if before is not None:
            generator.set_state(before)
        told: list[tuple[str, float | Tensor, float]] = []
        marks = [_mark(parameter) for parameter in replica.trained]
        with scope, _listening(worker, told):
            computed = self._eager(batch, worker, factors)
        if self.ended is not None:
            return computed
        if trial is not None:
            touched = [_mark(one) != mark for one, mark in zip(replica.trained, marks, strict=True)]
            failure = self._difference(graph, trial, computed, told, touched)
        if not failure and after is not None and not torch.equal(after, generator.get_state()):
            failure = "it draws other random numbers"
        if failure:
            self._end(f"a captured step differs from an eager one: {failure}", differs=True)
        return computed

    def _difference(
        self,
        graph: StepGraph,
        trial: Trial,
        computed: Computed,
        told: Sequence[tuple[str, float | Tensor, float]],
        touched: Sequence[bool],
    ) -> str:
        """The first value of a trial that is not that of the eager step, in words; "" where all are."""
        assert self._recorder is not None
        if [(name, weight) for name, _, weight in told] != list(graph.records):
            return "it records other numbers"
        module = self._replica.module
        pairs: list[tuple[str, Tensor | None, Tensor | None]] = [
            ("the loss", trial.computed.loss, computed.loss),
            ("the loss's weight", trial.computed.weight, computed.weight),
        ]
        for (name, value, _), mine in zip(told, trial.computed.scalars, strict=True):
            pairs.append((f"{name!r}", mine, torch.as_tensor(value)))
        names = {id(one): name for name, one in module.named_parameters()}
        for place, (parameter, gradient) in enumerate(
            zip(self._replica.trained, trial.gradients, strict=True)
        ):
            name = f"the gradient of {names[id(parameter)]!r}"
            if trial.touched[place] != touched[place]:
                return f"{name} is there in one of them alone"
            pairs.append((name, gradient, parameter.grad))
        for (name, buffer), mine in zip(module.named_buffers(), trial.buffers, strict=False):
            pairs.append((f"buffer {name!r}", mine, buffer))
        for name, one, other in pairs:
            if found := _unlike(one, other, self._recorder.bound):
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
        if self._plan.changed():
            self._end(f"what a step depends on changes too often, the last time: {change}")
        elif had_graphs:
            self._tell(f"capture: {change}; the step is captured anew")

    def _end(self, reason: str, *, differs: bool = False) -> None:
        self.ended = reason
        self._forms.clear()
        if self._recorder is not None:
            self._recorder.forget()
        how = "and goes on eagerly, from the eager result" if differs else "and runs eagerly"
        self._tell(f"capture: the step of this run is not captured {how}: {reason}")


@dataclass(slots=True)
class _Form:
    """Micro-batches that one graph is for.

    Attributes:
        specs: Samples; shape, strides and dtype of each tensor, and the values of other leaves.
        tree: How the leaves make a batch.
        plan: What is done with its steps.
        graph: Once it is recorded.
    """

    specs: tuple[Any, ...]
    tree: Form
    plan: FormPlan
    graph: StepGraph | None = None


def _spec(leaf: object) -> object:
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return type(leaf), leaf
    raise NotCaptured(f"the batch holds a {type(leaf).__name__}, which is no tensor of a fixed shape")


@contextmanager
def _listening(worker: CurrentWorker, told: list[tuple[str, float | Tensor, float]]) -> Iterator[None]:
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
    """Another one where a backward has added to the gradient since."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _unlike(mine: Tensor | None, theirs: Tensor | None, bound: float) -> str:
    """How a value differs from the eager one, in words; "" where it does not, by more than the bound."""
    if mine is None or theirs is None:
        return "" if mine is theirs else "is there in one of them alone"
    mine, theirs = mine.detach(), theirs.detach()
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"is a {mine.dtype} {tuple(mine.shape)} instead of a {theirs.dtype} {tuple(theirs.shape)}"
    if bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all()):  # NaN is like NaN
        return ""
    wide = torch.complex128 if mine.is_complex() else torch.float64
    off = float((mine.to(wide) - theirs.to(wide)).abs().max())
    largest = float(theirs.to(wide).abs().max())
    return "" if off <= bound * largest else f"differs by {off:.3g}, where the largest value is {largest:.3g}"
