"""Forward and backward of a module's call on CUDA as two graphs, behind one node of the caller's graph.

The node's inputs are the module's parameters, its outputs copies of those of the forward's graph; its
backward copies the gradients of the outputs in, and copies those of the parameters out. So all that a call
returns lies in memory of its own, and gradients arrive at the parameters by torch's own way: hooks,
accumulation, `zero_grad` and `autograd.grad` are as without graphs. What a backward needs of the forward lies
in memory of the graphs, so they serve no other call until it has run, or cannot run any more.

While it is recorded, other tensors stand in the places of the parameters and share their memory: a loss of
the caller's that is still alive keeps the nodes at which the parameters' graphs end, and these belong to the
stream of the caller, on which nothing may be captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.device.accelerator import device_generator
from flowdp.device.compiled import uses_compile
from flowdp.device.cuda_graphs import Graph, GraphPool
from flowdp.device.streams import StreamLane
from flowdp.device.trees import Form, flatten, unflatten
from flowdp.errors import FlowdpError
from flowdp.graphs.base import NotCaptured
from flowdp.graphs.trials import is_plain, refusal_of, without_trace

__all__ = ["CallGraphs", "unique_tensors"]

AGAIN = (
    "backward a second time through a captured call, behind a later one: what its backward needs lies in "
    "memory of a CUDA graph, where the later call has written over it; give flowdp.setup(..., capture=False)"
)
TWICE = (
    "create_graph=True differentiates a backward, and that of a captured call is a recorded one, which has "
    "no graph; give flowdp.setup(..., capture=False)"
)
SPENT = (
    "backward a second time through a captured call with compiled functions, whose first one writes over "
    "what it has used; give flowdp.setup(..., capture=False)"
)


class _Place(int):
    """The place of a leaf among the outputs."""


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The return value of a call.

    Attributes:
        tensors: Its tensors, each once.
        places: Of each leaf: the place of its tensor, or its value.
        tree: How the leaves make it.
    """

    tensors: list[Tensor]
    places: list[Any]
    tree: Form

    @property
    def names(self) -> list[str]:
        """The tensors, in words."""
        names: dict[int, str] = {}
        for place, path in zip(self.places, self.tree.paths(), strict=True):
            if type(place) is _Place:
                names.setdefault(place, f"output {path}".strip())
        return [names[place] for place in range(len(self.tensors))]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """The same, of other tensors."""
        leaves = [tensors[place] if type(place) is _Place else place for place in self.places]
        return unflatten(leaves, self.tree)


_NOTHING = _Outputs([], [], Form())


class _Use:
    """Lives as long as a call's backward may still run."""


class CallGraphs:
    """The graphs of a module's calls of one form.

    Args:
        module: Module that is called.
        lane: Lane of its device.
        leaves: Leaves of the arguments of such a call, `[args, kwargs]`.
        tree: How they make the arguments.
        state: Tensors that a call may write to.

    Attributes:
        parameters: The parameters that the outputs depend on.
        is_compiled: Whether functions of torch.compile are part of it.

    Threads: the caller's, and autograd's of the device.

    Streams: The current one; it must be the same in all calls.
    """

    def __init__(
        self,
        module: nn.Module,
        lane: StreamLane,
        leaves: Sequence[Any],
        tree: Form,
        state: Sequence[Tensor] = (),
    ) -> None:
        self.parameters: list[nn.Parameter] = []
        self.is_compiled = uses_compile(module)
        self._state = state or [*module.buffers(), *module.parameters()]
        self._module = module
        self._lane = lane
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        own = iter(self._inputs)
        given = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._arguments = unflatten(given, tree)
        self._pool = GraphPool(lane)  # its own: what lies there until a backward is written over by no other
        self._forward: Graph | None = None
        self._backward: Graph | None = None
        self._outputs = _NOTHING
        self._gradients: list[Tensor | None] = []  # of the outputs; None: it has none
        self._found: list[Tensor | None] = []  # gradients of the parameters
        self._needs: list[set[int]] = []  # of each output: the parameters that it depends on
        # Its memory stays where a graph reads it, also where the module gets other tensors meanwhile.
        self._memory = [parameter.detach() for parameter in (*module.buffers(), *module.parameters())]
        self._standing: Sequence[Tensor] = []  # in the places of `parameters`
        self._use: weakref.ref[_Use] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a backward needs what they hold."""
        return self._use is not None and self._use() is not None

    @property
    def names(self) -> list[str]:
        """The outputs, in words."""
        return self._outputs.names

    # ------------------------------------------------------------ recording
    def record(self) -> None:
        """Capture them; module and generator are left as they were.

        Raises:
            NotCaptured: It cannot be captured; nothing is left of the attempt.
        """
        with without_trace(self._state, device_generator(self._lane.device)):
            refusal = refusal_of(self._rehearse) or refusal_of(self._capture)
        if refusal is not None:
            self._pool.clear()
            raise NotCaptured(refusal)

    def _rehearse(self) -> None:
        """Run them eagerly, so that every kernel is loaded and tuned, and note what they depend on."""
        with self._standing_in() as leaves:
            self._call()
            self._trace_back(leaves)
            zeros = [torch.zeros_like(output) for output in self._outputs.tensors]
            for gradient in self._differentiate(zeros):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise NotCaptured("it has sparse gradients, which have no fixed memory")
        self._outputs = _NOTHING  # they have their graph

    def _capture(self) -> None:
        with self._standing_in():
            self._forward = self._pool.capture(self._call)
            outputs = self._outputs
            try:
                self._gradients = [
                    torch.zeros_like(output.detach()) if output.requires_grad else None
                    for output in outputs.tensors
                ]

                def backward() -> None:
                    self._found = list(self._differentiate(self._gradients))

                if any(gradient is not None for gradient in self._gradients):
                    self._backward = self._pool.capture(backward)
            finally:
                self._outputs = replace(outputs, tensors=[output.detach() for output in outputs.tensors])

    def _call(self) -> None:
        """Forward of the inputs."""
        torch.clear_autocast_cache()  # casts of parameters may lie there from before, and would stay
        args, kwargs = self._arguments
        made, tree = flatten(self._module(*args, **kwargs))
        torch.clear_autocast_cache()
        tensors = unique_tensors(made)
        places = {id(output): _Place(place) for place, output in enumerate(tensors)}
        for leaf in made:
            if isinstance(leaf, Tensor):
                if leaf.layout is not torch.strided or leaf.device != self._lane.device:
                    raise NotCaptured(f"it returns a {leaf.layout} tensor on {leaf.device}")
            elif not is_plain(leaf):
                raise NotCaptured(
                    f"it returns a {type(leaf).__name__}, which is neither tensor nor plain value"
                )
        self._outputs = _Outputs(tensors, [places.get(id(leaf), leaf) for leaf in made], tree)

    def _differentiate(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, by those of all outputs that have some."""
        pairs = zip(self._outputs.tensors, gradients, strict=True)
        chosen = [(one, own) for one, own in pairs if one.requires_grad and own is not None]
        if not chosen:
            return ()
        kind = self._lane.device.type
        with torch.autograd.set_multithreading_enabled(False), torch.autocast(kind, enabled=False):
            return torch.autograd.grad(
                [one for one, _ in chosen],
                self._standing,
                [own for _, own in chosen],
                allow_unused=True,
            )

    def _trace_back(self, leaves: Sequence[Tensor]) -> None:
        """Find the parameters that each output depends on.

        Raises:
            NotCaptured: One depends on a tensor that is no parameter of the module.
        """
        known = {id(leaf): place for place, leaf in enumerate(leaves)}
        found: list[set[int]] = []
        for output in self._outputs.tensors:
            ends = [output] if output.requires_grad and output.is_leaf else list(_ends(output.grad_fn))
            if any(id(end) not in known for end in ends):
                raise NotCaptured(
                    "it takes a tensor that requires grad from elsewhere: make it a parameter of the module"
                )
            found.append({known[id(end)] for end in ends})
        used = sorted(set().union(*found))
        self.parameters = [self._trained[place] for place in used]
        self._standing = [leaves[place] for place in used]
        self._needs = [{used.index(place) for place in one} for one in found]

    @contextmanager
    def _standing_in(self) -> Iterator[list[nn.Parameter]]:
        """Context in which new leaves stand in the places of the trained parameters, in the same memory."""
        leaves = [nn.Parameter(parameter.detach()) for parameter in self._trained]
        instead = {id(parameter): leaf for parameter, leaf in zip(self._trained, leaves, strict=True)}
        self._standing = [instead[id(parameter)] for parameter in self.parameters]
        held = [
            (part, name, parameter)
            for part in self._module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in instead
        ]
        for part, name, parameter in held:  # by the class, which may keep a list of its own, as nn.LSTM does
            setattr(part, name, instead[id(parameter)])
        try:
            yield leaves
        finally:
            for part, name, parameter in held:
                setattr(part, name, parameter)
            self._standing = []

    # ------------------------------------------------------------ running
    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The outputs of a call, with its graph.

        Args:
            tensors: Tensors among the leaves of the arguments.
        """
        made: Sequence[Tensor]
        if self._backward is not None:
            made = _CallNode.apply(self, tensors, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            made = self.forward(tensors)
        return self._outputs.of(made)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, each once, without a graph; buffers change."""
        assert self._forward is not None
        self._use = None
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(tensors))
        self._forward.replay()
        return [output.clone() for output in self._outputs.tensors]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters, in new memory; None where no output with a gradient needs one.

        Args:
            gradients: Of each output, behind its forward; None: it has none.
        """
        needed: set[int] = set()
        for needs, given, own in zip(self._needs, gradients, self._gradients, strict=True):
            if given is not None and own is not None:
                own.copy_(given)
                needed |= needs
            elif own is not None:
                own.zero_()
        if not needed:
            return [None] * len(self.parameters)
        assert self._backward is not None
        self._backward.replay()
        made: list[Tensor | None] = [None] * len(self.parameters)
        chosen = {place: one for place, one in enumerate(self._found) if one is not None and place in needed}
        # Copies by one call, which makes their memory, too; clones are a launch for each. A number plus -0.0
        # is that number, a zero of either sign.
        for place, copy in zip(chosen, torch._foreach_add([*chosen.values()], -0.0), strict=True):
            made[place] = copy
        return made

    def eager(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the parameters by the user's Python, of the last call's inputs.

        Args:
            gradients: Of each output.
        """
        kept = self._outputs
        try:
            with self._standing_in():
                self._call()
                return list(self._differentiate(gradients))
        finally:
            self._outputs = kept


class _CallNode(torch.autograd.Function):
    """The node of a call in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, graphs: CallGraphs, tensors: Sequence[Tensor], *_parameters: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        outputs = graphs.forward(tensors)
        plain = zip(outputs, graphs._gradients, strict=True)
        ctx.mark_non_differentiable(*(one for one, gradient in plain if gradient is None))
        ctx.graphs, ctx.use, ctx.has_run = graphs, _Use(), False
        graphs._use = ctx.mine = weakref.ref(ctx.use)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graphs: CallGraphs = ctx.graphs
        if torch.is_grad_enabled():
            raise FlowdpError(TWICE)
        if graphs._use is not ctx.mine:
            raise RuntimeError(AGAIN)
        if ctx.has_run and graphs.is_compiled:
            raise FlowdpError(SPENT)
        made = graphs.backward(gradients)
        ctx.has_run = True
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.use = None
        return None, None, *made


def unique_tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among leaves, each once."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _ends(node: Any) -> Iterator[Tensor]:
    """The leaves at which a graph ends."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [following for following, _ in node.next_functions]
