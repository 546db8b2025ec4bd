"""Captured steps on the CPU: forward and backward as one graph that runs without the interpreter lock.

A loss is run once under torch's tracing modes, on tensors without contents, backward included. So nothing
is computed, drawn or written meanwhile, and a loss that takes a number out of a tensor is found out. The
inputs of the graph are the replica's tensors themselves: it reads the parameters where they are, adds to the
gradients and updates the buffers in place. Ranks of one architecture share a graph.

`lower` makes of a graph a function that needs no interpreter lock; another executor can take its place there.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental import proxy_tensor

from flowdp.data.trees import tree_map
from flowdp.device.dispatch import RankMode
from flowdp.device.draws import is_random, seeded_form
from flowdp.engine.captured import Computed, Factors, NotCaptured, Trial, watching
from flowdp.engine.context import CurrentWorker
from flowdp.engine.guards import Guards, is_alike
from flowdp.policy.formats import format_error

if TYPE_CHECKING:
    from flowdp.engine.replica import Replica

__all__ = ["CpuGraph", "CpuRecorder", "SharedGraphs", "lower"]

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True, slots=True)
class Traced:
    """A recorded step, as a function of a replica's tensors.

    Attributes:
        function: Of (own tensors, gradients, leaves, share, of[, generator]); returns the loss, its weight
            where it names one, and the recorded values.
        touched: Places of the trained parameters that get a gradient, among all trained ones.
        records: See `StepGraph`.
        draws: See `StepGraph`.
        has_weight: Whether the loss names a weight.
        constants: Tensors that belong to nobody's tables; they follow the own tensors.
        watched: Snapshot of the guards of the rank that recorded.
        form: Of the micro-batch and of the parameters, for comparison.
    """

    function: Function
    touched: Sequence[int]
    records: Sequence[tuple[str, float]]
    draws: bool
    has_weight: bool
    constants: Sequence[Tensor]
    watched: Sequence[tuple[str, object]]
    form: object


class SharedGraphs:
    """The graphs of all ranks of a run: one rank records, the others take what was recorded.

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
    """Makes the graphs of one replica on the CPU; see `Recorder`.

    Args:
        replica: Whose.
        modules: All that the step reads, by name: the replica's, and those in the loss.
        guards: Of the replica.
        shared: Of the run.
    """

    bound = 0.0

    def __init__(
        self, replica: Replica, modules: Mapping[str, nn.Module], guards: Guards, shared: SharedGraphs
    ) -> None:
        self._replica = replica
        self._tables = _Tables(modules)
        self._guards = guards
        self._shared = shared

    def record(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker,
        factors: Factors,  # noqa: ARG002 - inputs of the graph
    ) -> CpuGraph:
        """Record a step, or take what another rank has recorded; see `Recorder.record`."""
        self._check()
        tables = self._tables
        tables.read()
        own = tables.tensors
        form = [
            [(tuple(one.shape), one.stride(), one.dtype, one.requires_grad) for one in (*own, *leaves)],
            worker.samples,
            self._replica._autocast,
        ]
        with self._shared.lock:
            traced = self._shared.find(form, self._guards)
            if traced is None:
                traced = self._trace(batch, leaves, worker, form)
                self._shared.add(traced)
        trained = self._replica.trained
        return CpuGraph(
            traced,
            [*own, *traced.constants],
            [place for place, one in enumerate(own) if not isinstance(one, nn.Parameter)],
            trained,
        )

    def step(self, factor: float) -> bool:  # noqa: ARG002 - there is no graph of it on the CPU
        """See `Recorder.step`: the optimizer steps flat memory eagerly, which is a few calls."""
        return False

    def forget(self) -> None:
        """See `Recorder.forget`; the other ranks may still need what is shared."""

    def _check(self) -> None:
        replica = self._replica
        if replica._scaler is not None:
            raise NotCaptured("precision='fp16' scales its loss by Python on the CPU: use 'bf16'")
        if replica.meets:
            raise NotCaptured("its forwards meet those of the other ranks (SyncBatchNorm)")
        for name, parameter in replica.module.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise NotCaptured(f"parameter {name!r} has hooks, which a recorded backward does not call")
            if parameter.requires_grad and not any(parameter is one for one in replica.trained):
                raise NotCaptured(f"parameter {name!r} was frozen when the run began, and requires grad now")

    def _trace(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker,
        form: object,
    ) -> Traced:
        try:
            with watching(worker) as seen:
                trace = _Trace(self._replica, self._tables)
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
            trace.constants,
            self._guards.snapshot(),
            form,
        )


class CpuGraph:
    """A recorded step of one rank; see `StepGraph`.

    Args:
        traced: The function, which other ranks may use too.
        own: The replica's tensors.
        buffers: Places of the buffers among them.
        trained: The parameters that the optimizer steps.
    """

    def __init__(
        self,
        traced: Traced,
        own: Sequence[Tensor],
        buffers: Sequence[int],
        trained: Sequence[nn.Parameter],
    ) -> None:
        self.records = traced.records
        self.draws = traced.draws
        self._traced = traced
        self._tensors = own
        self._buffers = buffers
        self._trained = trained
        self._touched = [trained[place] for place in traced.touched]
        self._own = torch._C.ScriptList([one.detach() for one in own])
        self._factors: Factors | None = None
        self._numbers: tuple[Tensor, ...] = ()
        self._gradients: Any = None
        self._into: list[Tensor] = []

    def run(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Computed:
        """See `StepGraph.run`."""
        gradients = [parameter.grad for parameter in self._touched]
        if not self._into or not all(map(operator.is_, gradients, self._into)):
            self._attach(gradients)
        return self._call(self._own, self._gradients, leaves, factors, generator)

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

    def trial(self, leaves: Sequence[Tensor], factors: Factors, generator: torch.Generator | None) -> Trial:
        """See `StepGraph.trial`: the run gets copies, as a forward may write to anything it is given."""
        own = [one.detach().clone() for one in self._tensors]
        leaves = [one.clone() for one in leaves]
        before = [parameter.grad for parameter in self._trained]
        after = [None if one is None else one.clone() for one in before]
        for place in self._traced.touched:
            if after[place] is None:
                after[place] = torch.zeros_like(self._trained[place]).detach()
        gradients = [after[place] for place in self._traced.touched]
        script_list = torch._C.ScriptList
        computed = self._call(script_list(own), script_list(gradients), leaves, factors, generator)
        touched = [place in self._traced.touched for place in range(len(self._trained))]
        return Trial(computed, after, [own[place] for place in self._buffers], touched)

    def _call(
        self,
        own: Any,
        gradients: Any,
        leaves: Sequence[Tensor],
        factors: Factors,
        generator: torch.Generator | None,
    ) -> Computed:
        if factors != self._factors:
            self._factors = factors
            self._numbers = _numbers(factors)
        inputs = [own, gradients, list(leaves), *self._numbers]
        if self.draws:
            inputs.append(torch.default_generator if generator is None else generator)
        # With gradients enabled, as nothing asks for them: some kernels keep for a backward what it needs.
        loss, *rest = self._traced.function(*inputs)
        weight = rest.pop(0) if self._traced.has_weight else None
        return Computed(loss, weight, rest)


def _numbers(factors: Factors) -> tuple[Tensor, Tensor]:
    return torch.tensor(factors.share, dtype=torch.float64), torch.tensor(factors.of, dtype=torch.float64)


class _Tables:
    """All tensors that the modules of a step hold, and others in their place for a while."""

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
        """Others in place of the tensors.

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
    """Around torch's tracing modes: keeps their flags right among threads, and sees each operation."""

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

    def __init__(self, replica: Replica, tables: _Tables) -> None:
        self._replica = replica
        self._tables = tables
        self._tracer = proxy_tensor.PythonKeyTracer()
        self._tracer.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
        self._tracer.graph = self.graph
        self._tracer.tensor_attrs = {}
        self.touched: list[int] = []
        self.constants: list[Tensor] = []
        self.draws = self.has_weight = False

    def run(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        worker: CurrentWorker,
        recorded: Sequence[Tensor],
    ) -> None:
        """Record; `recorded` gets the values that the loss records.

        Raises:
            NotCaptured: See `CpuRecorder.record`.
        """
        own = self._tables.tensors
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
        _Inputs(self.graph, self._tracer.root, own, len(leaves)).rewrite(self, nodes[:count], nodes[count:])

    def _differentiate(
        self,
        batch: Any,
        leaves: Sequence[Tensor],
        inputs: Sequence[Tensor],
        worker: CurrentWorker,
        recorded: Sequence[Tensor],
    ) -> list[Tensor]:
        """The loss, its weight, recorded values, and the gradients of the touched parameters."""
        replica, own = self._replica, self._tables.tensors
        *own_inputs, share, of = inputs
        twins = {id(leaf): twin for leaf, twin in zip(leaves, own_inputs[len(own) :], strict=True)}
        batch = tree_map(lambda leaf: twins.get(id(leaf), leaf), batch)
        trained = {id(one): place for place, one in enumerate(replica.trained) if one.requires_grad}
        stand_ins, wanted = [], []
        for one, twin in zip(own, own_inputs[: len(own)], strict=True):
            if id(one) in trained:
                twin = twin.detach().requires_grad_()
                wanted.append((trained[id(one)], twin))
            stand_ins.append(twin)
        with self._tables.replaced(stand_ins):
            loss, weight = replica.weigh(replica._forward(batch, worker), share, of)
            gradients = torch.autograd.grad(loss, [twin for _, twin in wanted], allow_unused=True)
        found = []
        for (place, twin), gradient in zip(wanted, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or gradient.dtype != twin.dtype:
                raise NotCaptured("a gradient is sparse, or of another dtype than its parameter")
            self.touched.append(place)
            found.append(gradient)
        if not found:
            raise NotCaptured("no parameter of the replica has a part in the loss")
        self.has_weight = weight is not None
        return [loss.detach(), *(() if weight is None else (weight,)), *recorded, *found]

    def _node(self, tensor: Tensor) -> fx.Node:
        try:
            slot: Any = proxy_tensor.get_proxy_slot(tensor, self._tracer)
            node: fx.Node = slot.proxy.node
        except KeyError:
            raise NotCaptured("the step returns or records a tensor that it has not computed") from None
        return node


class _Inputs:
    """Makes of a recorded graph one whose inputs are lists: a call hands over a few objects."""

    def __init__(self, graph: fx.Graph, root: nn.Module, own: Sequence[Tensor], leaves: int) -> None:
        self._graph = graph
        self._root = root
        self._own = own
        self._leaves = leaves

    def rewrite(self, trace: _Trace, results: Sequence[fx.Node], gradients: Sequence[fx.Node]) -> None:
        """Rewrite the graph of a trace, and note its constants and whether it draws."""
        graph = self._graph
        old = [node for node in graph.nodes if node.op == "placeholder"]
        tensors = list[Tensor]
        with graph.inserting_before(old[0]):
            own, into, leaves = (
                graph.placeholder(name, type_expr=tensors) for name in ("own", "gradients", "leaves")
            )
            share, of = graph.placeholder("share"), graph.placeholder("of")
            generator = graph.placeholder("generator", type_expr=torch.Generator)
        count = len(self._own)
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            for place, node in enumerate(old[:-2]):
                source, at = (own, place) if place < count else (leaves, place - count)
                _replace(graph, node, graph.call_function(operator.getitem, (source, at)))
        _replace(graph, old[-2], share)
        _replace(graph, old[-1], of)
        for node in list(graph.nodes):
            if node.op == "get_attr":
                with graph.inserting_before(node):
                    at = count + self._constant(trace, node)
                    _replace(graph, node, graph.call_function(operator.getitem, (own, at)))
            elif node.target is torch.ops.aten.detach.default:
                kept: Any = node.args[0]
                results = [kept if one is node else one for one in results]
                gradients = [kept if one is node else one for one in gradients]
                _replace(graph, node, kept)
            elif isinstance(node.target, torch._ops.OpOverload) and is_random(
                node.target, node.args, node.kwargs
            ):
                self._draw(trace, node, generator)
        graph.call_function(torch.ops.aten._foreach_add_.List, (into, list(gradients)))
        graph.output(list(results))
        graph.eliminate_dead_code(_has_effect)
        if not trace.draws:
            graph.erase_node(generator)

    def _constant(self, trace: _Trace, node: fx.Node) -> int:
        tensor = getattr(self._root, str(node.target))
        storages = {one.untyped_storage().data_ptr() for one in self._own if one.numel()}
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in storages:
            raise NotCaptured("the loss reads a parameter past the model that is passed in")
        for place, one in enumerate(trace.constants):
            if one is tensor:
                return place
        trace.constants.append(tensor)
        return len(trace.constants) - 1

    def _draw(self, trace: _Trace, node: fx.Node, generator: fx.Node) -> None:
        trace.draws = True
        form = seeded_form(node.target)
        if form is None:
            raise NotCaptured(f"{node.target} draws random numbers and takes no generator")
        node.target = form
        node.kwargs = {**node.kwargs, "generator": generator}


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node is kept even if its result is not used."""
    if node.op in ("placeholder", "output"):
        return True
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target._schema.is_mutable) or torch.Tag.nondeterministic_seeded in target.tags


def lower(graph: fx.Graph) -> Function:
    """A function that runs a graph of torch's operations without the interpreter lock.

    Today by TorchScript's interpreter, the only one in torch's wheels that gives the lock away for a whole
    graph, needs no compiler and runs the kernels of an eager step. Torch has declared it deprecated.

    Raises:
        NotCaptured: This torch has no such interpreter, or it does not know an operation of the graph.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise NotCaptured(f"{node.target} is no operation of torch's own")
    if not hasattr(torch.jit, "script"):
        raise NotCaptured("this torch has no TorchScript, which runs recorded graphs on the CPU")
    module = fx.GraphModule(nn.Module(), graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated is said in the documentation
        interpreted: Function = torch.jit.script(module).forward

    def function(*inputs: Any) -> list[Tensor]:
        # Its optimizations decompose kernels, and so round otherwise. The switch is the thread's.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return interpreted(*inputs)

    return function


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
