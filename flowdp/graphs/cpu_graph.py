"""Captured steps on the CPU: forward and backward as one graph that runs without the interpreter lock.

A loss is run once under torch's tracing modes, on tensors without contents, backward included. So nothing
is computed, drawn or written meanwhile, and a loss that takes a number out of a tensor is found out. The
inputs of the graph are the rank's tensors themselves: it reads the parameters where they are, adds to the
gradients and updates the buffers in place. Gradients that other code keeps it makes anew instead, as an
eager backward does. Ranks of one architecture share a graph.

`lowering` makes of a graph a function that needs no interpreter lock.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental import proxy_tensor

from flowdp.collective.gradient_sum import give_gradients
from flowdp.data.trees import tree_map
from flowdp.device.dispatch import RankMode
from flowdp.device.draws import is_random
from flowdp.device.worker_context import CurrentWorker
from flowdp.device.writes import storage_of
from flowdp.graphs.base import Capturable, Computed, Factors, NotCaptured, Outputs, TrialStep, watching
from flowdp.graphs.guards import Guards, is_alike
from flowdp.graphs.lowering import Function, Inputs, lower
from flowdp.policy.formats import format_error

__all__ = ["CpuGraph", "CpuRecorder", "SharedGraphs"]


@dataclass(frozen=True, slots=True)
class Traced:
    """A recorded step, as a function of a rank's tensors.

    Attributes:
        function: Function of (own tensors[, gradients], leaves, share, of[, generator]); returns the loss,
            its weight where it names one, the recorded values and further results. It adds to gradients that
            it is given, else it returns them, too.
        touched: Places of the trained parameters that get a gradient, among all trained ones.
        records: See `StepGraph`.
        draws: See `StepGraph`.
        has_weight: Whether the loss names a weight.
        outputs: Further results; None: there are none.
        constants: Tensors outside of all modules; they follow the own tensors.
        watched: Snapshot of the guards of the rank that recorded.
        form: Form of the micro-batch and of the parameters, for comparison.
    """

    function: Function
    touched: Sequence[int]
    records: Sequence[tuple[str, float]]
    draws: bool
    has_weight: bool
    outputs: Outputs | None
    constants: Sequence[Tensor]
    watched: Sequence[tuple[str, object]]
    form: object


class SharedGraphs:
    """The graphs of all ranks of a run: one rank records, the others take its recording.

    Attributes:
        lock: Held while a rank records; for the process, as torch's tracing modes are not made for several
            threads.

    Threads: any.
    """

    lock = threading.Lock()

    def __init__(self) -> None:
        self._traced: list[Traced] = []

    def find(self, form: object, guards: Guards) -> Traced | None:
        """A graph of the same step. Hold `lock`."""
        watched = guards.snapshot()
        for one in self._traced:
            if not one.constants and one.form == form and is_alike(one.watched, watched):
                return one
        return None

    def add(self, traced: Traced) -> None:
        """Keep a graph for the other ranks. Hold `lock`."""
        self._traced.append(traced)


class CpuRecorder:
    """Makes the graphs of one rank on the CPU; see `Recorder`.

    Args:
        step: Forward and backward to record.
        modules: Those that the step reads and no other rank, by name: the rank's, and those in its loss.
        guards: Guards of the rank.
        shared: Graphs shared by all ranks.
    """

    bound = 0.0

    def __init__(
        self, step: Capturable, modules: Mapping[str, nn.Module], guards: Guards, shared: SharedGraphs
    ) -> None:
        self._step = step
        self._own = _OwnTensors(modules)
        self._guards = guards
        self._shared = shared

    def record(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker | None,
        _factors: Factors,  # inputs of the graph
    ) -> CpuGraph:
        """Record a step, or take another rank's recording; see `Recorder.record`."""
        self._check()
        self._own.read()
        own = self._own.tensors
        form = [
            [(tuple(one.shape), one.stride(), one.dtype, one.requires_grad) for one in (*own, *leaves)],
            0 if worker is None else worker.samples,
            self._step.casts,
        ]
        with self._shared.lock:
            traced = self._shared.find(form, self._guards)
            if traced is None:
                traced = self._trace(batch, leaves, worker, form)
                self._shared.add(traced)
        return CpuGraph(
            traced,
            [*own, *traced.constants],
            [place for place, one in enumerate(own) if not isinstance(one, nn.Parameter)],
            self._step.trained,
            gives=self._step.gives_gradients,
        )

    def forget(self) -> None:
        """See `Recorder.forget`; the other ranks may still need the shared graphs."""

    def _check(self) -> None:
        step = self._step
        if (obstacle := step.obstacle) is not None:
            raise NotCaptured(obstacle)
        for name, parameter in step.module.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise NotCaptured(f"parameter {name!r} has hooks, which a recorded backward does not call")
            if parameter.requires_grad and not any(parameter is one for one in step.trained):
                raise NotCaptured(f"parameter {name!r} was frozen when the run began, and requires grad now")

    def _trace(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker | None,
        form: object,
    ) -> Traced:
        try:
            with watching(worker) as seen:
                trace = _Trace(self._step, self._own)
                trace.run(batch, leaves, worker, seen.values)
            function = lower(trace.graph)
        except (NotCaptured, torch.OutOfMemoryError):
            raise
        except DataDependentOutputException as error:
            raise NotCaptured(
                f"the step takes a number out of a tensor ({error.func}: .item(), float(), or an if on a "
                f"tensor){_place(error)}, and goes on by it"
            ) from error
        except DynamicOutputShapeException as error:
            raise NotCaptured(
                f"the shape of a tensor depends on data ({error.func}: a mask as an index, nonzero, unique)"
                f"{_place(error)}"
            ) from error
        except Exception as error:
            raise NotCaptured(
                f"torch cannot record it ({format_error(error)[:400]}){_place(error)}"
            ) from error
        return Traced(
            function,
            trace.touched,
            seen.records,
            trace.draws,
            trace.has_weight,
            trace.outputs,
            trace.constants,
            self._guards.snapshot(),
            form,
        )


class CpuGraph:
    """A recorded step of one rank; see `StepGraph`.

    Args:
        traced: The function, which other ranks may use too.
        own: Tensors of the rank.
        buffers: Places of the buffers among them.
        trained: The parameters that get gradients.
        gives: Whether the function returns the gradients.
    """

    def __init__(
        self,
        traced: Traced,
        own: Sequence[Tensor],
        buffers: Sequence[int],
        trained: Sequence[Tensor],
        *,
        gives: bool,
    ) -> None:
        self.records = traced.records
        self.draws = traced.draws
        self._traced = traced
        self._tensors = own
        self._buffers = buffers
        self._trained = trained
        self._gives = gives
        self._touched = [trained[place] for place in traced.touched]
        self._own = torch._C.ScriptList([one.detach() for one in own])
        self._factors: Factors | None = None
        self._numbers: tuple[Tensor, ...] = ()
        self._gradients: Any = None
        self._into: list[Tensor] = []

    def run(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Computed:
        """See `StepGraph.run`."""
        if self._gives:
            computed, given = self._call(self._own, (), leaves, factors, generator)
            give_gradients(self._touched, given)
            return computed
        gradients = [parameter.grad for parameter in self._touched]
        if not self._into or not all(map(operator.is_, gradients, self._into)):
            self._attach(gradients)
        return self._call(self._own, (self._gradients,), leaves, factors, generator)[0]

    def _attach(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the graph add to the gradients that are there, and to its own where there are none."""
        if not self._into:
            self._into = [torch.zeros_like(one).detach() for one in self._touched]
        self._into = [own if one is None else one for one, own in zip(gradients, self._into, strict=True)]
        self._gradients = torch._C.ScriptList(self._into)
        missing = [own for one, own in zip(gradients, self._into, strict=True) if one is None]
        if missing:
            torch._foreach_zero_(missing)
            for parameter, own in zip(self._touched, self._into, strict=True):
                parameter.grad = own

    def trial(
        self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None
    ) -> TrialStep:
        """See `StepGraph.trial`: the run gets copies, as a forward may write to anything it is given."""
        own = [one.detach().clone() for one in self._tensors]
        leaves = [one.clone() for one in leaves]
        before = [parameter.grad for parameter in self._trained]
        after = [None if one is None else one.clone() for one in before]
        script_list = torch._C.ScriptList
        if self._gives:
            computed, given = self._call(script_list(own), (), leaves, factors, generator)
            for place, gradient in zip(self._traced.touched, given, strict=True):
                known = after[place]
                after[place] = gradient if known is None else known + gradient
        else:
            for place in self._traced.touched:
                if after[place] is None:
                    after[place] = torch.zeros_like(self._trained[place]).detach()
            into = script_list([after[place] for place in self._traced.touched])
            computed, _ = self._call(script_list(own), (into,), leaves, factors, generator)
        touched = [place in self._traced.touched for place in range(len(self._trained))]
        return TrialStep(computed, after, [own[place] for place in self._buffers], touched)

    def _call(
        self,
        own: Any,
        into: Sequence[Any],
        leaves: Sequence[Tensor],
        factors: Factors,
        generator: torch.Generator | None,
    ) -> tuple[Computed, Sequence[Tensor]]:
        """The results, and the gradients where they are returned."""
        if factors != self._factors:
            self._factors = factors
            self._numbers = _numbers(factors)
        inputs = [own, *into, list(leaves), *self._numbers]
        if self.draws:
            inputs.append(torch.default_generator if generator is None else generator)
        # With gradients enabled, as nothing asks for them: some kernels keep tensors for a backward.
        # Its casts are in the graph: a caller's autocast would look for them at each operation.
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            loss, *rest = self._traced.function(*inputs)
        given: Sequence[Tensor] = ()
        if not into:
            count = len(rest) - len(self._touched)
            rest, given = rest[:count], rest[count:]
        weight = rest.pop(0) if self._traced.has_weight else None
        if self._traced.outputs is None:
            return Computed(loss, weight, rest), given
        count = len(self.records)
        return Computed(loss, weight, rest[:count], self._traced.outputs.of(rest[count:])), given


def _numbers(factors: Factors) -> tuple[Tensor, Tensor]:
    return torch.tensor(factors.share, dtype=torch.float64), torch.tensor(factors.of, dtype=torch.float64)


class _OwnTensors:
    """The tensors of a step's modules, and others in their place for a while."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = list(modules.values())
        self.tensors: list[Tensor] = []

    def read(self) -> None:
        """Find the tensors: each once, in the order of the modules, parameters first."""
        found: dict[int, Tensor] = {}
        for kind in ("_parameters", "_buffers"):
            for module in self._modules:
                for part in module.modules():
                    for tensor in getattr(part, kind).values():
                        if tensor is not None:
                            found.setdefault(id(tensor), tensor)
        self.tensors = list(found.values())

    @contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Context with others in place of the tensors.

        Raises:
            NotCaptured: A forward has put a new tensor into the place of one.
        """
        twins = {id(one): other for one, other in zip(self.tensors, others, strict=True)}
        back: list[tuple[Any, Any, Tensor]] = []
        try:
            for module in self._modules:
                for part in module.modules():
                    for table in (part._parameters, part._buffers):
                        back += _swap(table, list(table.items()), twins)
                    for value in vars(part).values():
                        if type(value) is list:  # of recurrent layers
                            back += _swap(value, list(enumerate(value)), twins)
            yield
            for table, key, one in back:
                if table[key] is not twins[id(one)]:
                    raise NotCaptured(
                        f"a forward puts a new tensor into {key!r}: let it write into the one that is there, "
                        "self.x.copy_(...)"
                    )
        finally:
            for table, key, one in back:
                table[key] = one


def _swap(
    table: Any, items: Sequence[tuple[Any, object]], twins: Mapping[int, Tensor]
) -> list[tuple[Any, Any, Tensor]]:
    back = []
    for key, value in items:
        if isinstance(value, Tensor) and id(value) in twins:
            table[key] = twins[id(value)]
            back.append((table, key, value))
    return back


class _Recording(RankMode):
    """Mode around torch's tracing modes, which sees each operation."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation.

        Raises:
            NotCaptured: It draws in a backward, or takes a number out of any tensor.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            raise NotCaptured(
                "the step takes a number out of a tensor (.item(), float(), or an if on a tensor), and goes "
                "on by it"
            )
        if is_random(func, args, kwargs or {}) and torch._C._current_graph_task_id() != -1:
            raise NotCaptured(
                f"its backward draws random numbers ({func}), as a forward does that torch.utils.checkpoint "
                "computes again"
            )
        return func(*args, **(kwargs or {}))


class _Trace:
    """One run of a step under torch's tracing modes, and the graph that it leaves."""

    def __init__(self, step: Capturable, own: _OwnTensors) -> None:
        self._step = step
        self._own = own
        self._tracer = proxy_tensor.PythonKeyTracer()
        self._tracer.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
        self._tracer.graph = self.graph
        self._tracer.tensor_attrs = {}
        self.touched: list[int] = []
        self.constants: Sequence[Tensor] = ()
        self.outputs: Outputs | None = None
        self.draws = self.has_weight = False

    def run(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker | None,
        recorded: Sequence[Tensor],
    ) -> None:
        """Record; `recorded` gets the values that the loss records.

        Raises:
            NotCaptured: See `CpuRecorder.record`.
        """
        own = self._own.tensors
        numbers = _numbers(Factors(1.0, 1))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = [fake.from_tensor(one.detach()) for one in (*own, *leaves, *numbers)]
        places = [self._tracer.create_proxy("placeholder", f"input_{k}", (), {}) for k in range(len(inputs))]
        proxy_tensor.track_tensor_tree(inputs, places, constant=None, tracer=self._tracer)
        with ExitStack() as stack:
            for mode in (_Recording(), fake, proxy_tensor.ProxyTorchDispatchMode(self._tracer, "fake")):
                stack.enter_context(mode)
            outputs = self._differentiate(batch, leaves, inputs, worker, recorded)
        nodes = [self._node(one) for one in outputs]
        count = len(outputs) - len(self.touched)
        inside = Inputs(self.graph, self._tracer.root, own, gives=self._step.gives_gradients)
        self.constants, self.draws = inside.rewrite(nodes[:count], nodes[count:])

    def _differentiate(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        inputs: Sequence[Tensor],
        worker: CurrentWorker | None,
        recorded: Sequence[Tensor],
    ) -> list[Tensor]:
        """The loss, its weight, recorded values, outputs, and the gradients of the touched parameters."""
        step, own = self._step, self._own.tensors
        *own_inputs, share, of = inputs
        twins = {id(leaf): twin for leaf, twin in zip(leaves, own_inputs[len(own) :], strict=True)}
        batch = tree_map(lambda leaf: twins.get(id(leaf), leaf), batch)
        trained = {id(one): place for place, one in enumerate(step.trained) if one.requires_grad}
        stand_ins, wanted = [], []
        for one, twin in zip(own, own_inputs[: len(own)], strict=True):
            if id(one) in trained:
                twin = twin.detach().requires_grad_()
                wanted.append((trained[id(one)], twin))
            stand_ins.append(twin)
        with self._own.replaced(stand_ins):
            passed = step.forward(batch, worker, share, of)
            loss, weight = passed.loss, passed.weight
            gradients = torch.autograd.grad(loss, [twin for _, twin in wanted], allow_unused=True)
        found, given = [], []
        for (place, twin), gradient in zip(wanted, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or gradient.dtype != twin.dtype:
                raise NotCaptured("a gradient is sparse, or of another dtype than its parameter")
            self.touched.append(place)
            found.append(gradient)
            given.append(twin)
        if not found:
            raise NotCaptured("no parameter of the replica has a part in the loss")
        self.has_weight = weight is not None
        made, self.outputs = Outputs.opened(passed.outputs)
        results = [loss.detach(), *(() if weight is None else (weight,)), *recorded, *made]
        if step.gives_gradients:
            taken = {*map(storage_of, (*inputs, *results))}
            found = [_as_own(gradient, twin, taken) for gradient, twin in zip(found, given, strict=True)]
        return [*results, *found]

    def _node(self, tensor: Tensor) -> fx.Node:
        try:
            slot: Any = proxy_tensor.get_proxy_slot(tensor, self._tracer)
            node: fx.Node = slot.proxy.node
        except KeyError:
            raise NotCaptured("the step returns or records a tensor that it has not computed") from None
        return node


def _as_own(gradient: Tensor, parameter: Tensor, taken: set[int]) -> Tensor:
    """A gradient of a fake backward, in memory of its own with the parameter's strides: a copy if need be.

    The memory of all other tensors that are read or returned is in `taken`; the gradient's is added.
    """
    if storage_of(gradient) in taken or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    taken.add(storage_of(gradient))
    return gradient


def _place(error: BaseException) -> str:
    """The line of the user's code that an error comes from, as " in file:line"; "" where there is none."""
    found = ""
    step = error.__traceback__
    while step is not None:
        space = step.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if space not in ("torch", "flowdp"):
            code = step.tb_frame.f_code
            found = f" in {code.co_filename.rpartition('/')[2]}:{step.tb_lineno}"
        step = step.tb_next
    return found
