"""Forward and backward of a module's call on CUDA as two graphs, behind one node of the caller's graph.

The node's inputs are the module's parameters, its outputs copies of those of the forward's graph; its
backward copies the gradients of the outputs in, and copies those of the parameters out. So all that a call
returns lies in memory of its own, and gradients arrive at the parameters by torch's own way: hooks,
accumulation, `zero_grad` and `autograd.grad` are as without graphs. What a backward needs of the forward lies
in memory of the graphs, so they serve no other call until it has run, or cannot run any more.

While it is recorded, other tensors stand in the places of the parameters and share their memory: a loss of
the caller's that is still alive keeps the nodes at which the parameters' graphs end, and these belong to the
stream of the caller, on which nothing may be captured.

Nothing of this module has run on a GPU yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data.trees import Form, flatten, unflatten
from flowdp.device.accelerator import device_generator
from flowdp.device.compiled import uses_compile
from flowdp.device.cuda_graphs import Graph, GraphPool
from flowdp.device.streams import StreamLane
from flowdp.device.writes import WritesNoted, storage_of
from flowdp.errors import FlowdpError
from flowdp.graphs.base import NotCaptured
from flowdp.graphs.trials import is_plain, reason_of, without_trace

__all__ = ["CallGraphs", "Pattern", "unique_tensors"]

Pattern = frozenset[int]
"""The outputs of a call that have gradients in a backward."""

AGAIN = (
    "Trying to backward through the graph a second time, and its saved values have been freed: they lie in "
    "memory of a CUDA graph, where the next call writes over them. Specify retain_graph=True in the first "
    "backward, or capture=False in flowdp.setup()"
)
TWICE = (
    "create_graph=True differentiates a backward, and that of a captured call is a recorded one, which has "
    "no graph; give flowdp.setup(..., capture=False)"
)
RETAINED = (
    "retain_graph=True keeps what a backward has used, and that of a captured call with compiled functions "
    "writes over it; give flowdp.setup(..., capture=False)"
)


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
        patterns: Patterns whose backward has a graph of its own. That of all outputs does for others, with
            zeros.
        others: Other patterns that backwards had.
        parameters: The parameters that the outputs depend on.

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
        self._state = state or [*module.buffers(), *module.parameters()]
        self.others: set[Pattern] = set()
        self.parameters: list[nn.Parameter] = []
        self._module = module
        self._lane = lane
        self._trained = [one for one in module.parameters() if one.requires_grad]
        self._inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        own = iter(self._inputs)
        given = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._args, self._kwargs = unflatten(given, tree)
        self._is_compiled = uses_compile(module)
        self._pool = GraphPool(lane)  # its own: what lies there until a backward is written over by no other
        self._forward: Graph | None = None
        self._backwards: dict[Pattern, tuple[Graph, list[Tensor | None]]] = {}
        self._outputs: list[Tensor] = []  # each once
        self._gradients: list[Tensor | None] = []  # of the outputs; None: it has none
        self._places: list[Any] = []  # of each leaf of the output: the place of its tensor, or its value
        self._tree = Form()
        self._needs: list[set[int]] = []  # of each output: the parameters that it depends on
        self._saved: list[Tensor] = []  # parameters and buffers that a backward reads
        self._counted: list[Tensor] = []  # tensors of which torch counts a write in each forward
        # Its memory stays where a graph reads it, also where the module gets other tensors meanwhile.
        self._memory = [one.detach() for one in (*module.buffers(), *module.parameters())]
        self._standing: Sequence[Tensor] = []  # in the places of `parameters`
        self._use: weakref.ref[_Use] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a backward needs what they hold."""
        return self._use is not None and self._use() is not None

    @property
    def patterns(self) -> Collection[Pattern]:
        """See the class."""
        return self._backwards.keys()

    @property
    def names(self) -> list[str]:
        """The outputs, in words."""
        found: dict[int, str] = {}
        for place, path in zip(self._places, self._tree.paths(), strict=True):
            if type(place) is _Place:
                found.setdefault(place, f"output {path}".strip())
        return [found[place] for place in range(len(self._outputs))]

    @property
    def may_have_more(self) -> bool:
        """Whether several patterns can be recorded."""
        return not self._is_compiled

    # ------------------------------------------------------------ recording
    def record(self, patterns: Collection[Pattern]) -> None:
        """Capture them; module and generator are left as they were.

        Args:
            patterns: Those that backwards of such calls had.

        Raises:
            NotCaptured: It cannot be captured; nothing is left of the attempt.
        """
        module, refusal = self._module, None
        for leaf in self._inputs:
            if leaf.device != self._lane.device:
                raise NotCaptured(f"a tensor among the arguments lies on {leaf.device}")
        if any(type(one) is not nn.Parameter for one in self._trained):
            raise NotCaptured("a parameter is of a class of its own")
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise NotCaptured("a part of it is a scripted module")
        with without_trace(self._state, device_generator(self._lane.device)):
            try:
                self._rehearse(patterns)
                self._capture(patterns)
            except NotCaptured as error:
                refusal = str(error)
            except Exception as error:
                refusal = reason_of(error)
        if refusal is not None:
            self._backwards.clear()
            self._pool.clear()
            raise NotCaptured(refusal)

    def _rehearse(self, patterns: Collection[Pattern]) -> None:
        """Run them eagerly, so that every kernel is loaded and tuned, and note what they touch."""
        module = self._module
        known = [*module.buffers(), *module.parameters()]
        versions = [(one, one._version) for one in known]
        own = [one._version for one in self._inputs]
        saved: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            saved.add(storage_of(tensor))
            return tensor

        with self._standing_in() as leaves, ExitStack() as stack:
            writes = WritesNoted([*self._state, *self._inputs])
            if not self._is_compiled:
                # Else dynamo would run the functions as they are written, and leave them so for good.
                stack.enter_context(writes)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
            self._call()
            stack.close()
            writes.undo()
            if writes.found:
                raise NotCaptured(
                    f"it writes to a tensor of {writes.found[0].numel()} numbers that no module holds, which "
                    "a recorded call would do twice: register it as a buffer"
                )
            self._check_memory()
            self._trace_back(leaves)
            gradients = [torch.zeros_like(one) if one.requires_grad else None for one in self._outputs]
            for pattern in self._wanted(patterns):
                for one in self._differentiate(pattern, gradients):
                    if one is not None and one.layout is not torch.strided:
                        raise NotCaptured("it has sparse gradients, which have no fixed memory")
            if any(one.data_ptr() != own.data_ptr() for one, own in zip(leaves, self._trained, strict=True)):
                raise NotCaptured("it moves its parameters to other memory")
        if [one._version for one in self._inputs] != own:
            raise NotCaptured("it writes to an argument: let it write to argument.clone()")
        self._counted = [one for one, version in versions if one._version != version]
        if self._is_compiled:  # all but those that a further call may write to before the backward
            counted = {id(one) for one in self._counted}
            self._saved = [one for one in known if id(one) not in counted]
        else:
            self._saved = [one for one in known if storage_of(one) in saved]
        self._outputs = []  # with their graph

    def _capture(self, patterns: Collection[Pattern]) -> None:
        with self._standing_in():
            self._forward = self._pool.capture(self._call)
            outputs = self._outputs
            try:
                self._gradients = [
                    torch.zeros_like(one.detach()) if one.requires_grad else None for one in outputs
                ]
                for pattern in self._wanted(patterns):
                    self._backwards[pattern] = self._capture_backward(pattern)
            finally:
                self._outputs = [one.detach() for one in outputs]

    def _capture_backward(self, pattern: Pattern) -> tuple[Graph, list[Tensor | None]]:
        made: list[Tensor | None] = []

        def work() -> None:
            made.extend(self._differentiate(pattern, self._gradients))

        return self._pool.capture(work), made

    def _wanted(self, patterns: Collection[Pattern]) -> list[Pattern]:
        """The patterns that get a graph, that of all outputs among them."""
        whole = Pattern(place for place, one in enumerate(self._outputs) if one.requires_grad)
        if not whole:
            return []
        # A compiled backward writes over the values that it has used, so it can be recorded once.
        others = [] if self._is_compiled else [one & whole for one in patterns]
        return [one for one in dict.fromkeys([whole, *others]) if one]

    def _call(self) -> None:
        """Forward of the inputs."""
        torch.clear_autocast_cache()  # casts of parameters may lie there from before, and would stay
        made, self._tree = flatten(self._module(*self._args, **self._kwargs))
        torch.clear_autocast_cache()
        self._outputs = unique_tensors(made)
        places = {id(one): _Place(place) for place, one in enumerate(self._outputs)}
        for leaf in made:
            if id(leaf) in places:
                if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                    raise NotCaptured(f"it returns a {leaf.layout} tensor")
                if leaf.device != self._lane.device:
                    raise NotCaptured(f"it returns a tensor that lies on {leaf.device}")
            elif not is_plain(leaf):
                raise NotCaptured(
                    f"it returns a {type(leaf).__name__}, which is neither tensor nor plain value"
                )
        self._places = [places.get(id(leaf), leaf) for leaf in made]

    def _check_memory(self) -> None:
        """Check that each output has memory of its own: a caller may write to one, and means all.

        Raises:
            NotCaptured: One has not.
        """
        taken = {storage_of(one) for one in (*self._state, *self._inputs)}
        for output in self._outputs:
            if storage_of(output) in taken:
                raise NotCaptured(
                    "an output shares memory with another one, an argument, a parameter or a buffer: return "
                    "output.clone()"
                )
            taken.add(storage_of(output))

    def _differentiate(
        self, pattern: Pattern, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, by those of some outputs."""
        places = sorted(pattern)
        kind = self._lane.device.type
        with torch.autograd.set_multithreading_enabled(False), torch.autocast(kind, enabled=False):
            return torch.autograd.grad(
                [self._outputs[place] for place in places],
                self._standing,
                [gradients[place] for place in places],
                retain_graph=not self._is_compiled,
                allow_unused=True,
            )

    def _trace_back(self, leaves: Sequence[Tensor]) -> None:
        """Find the parameters that each output depends on.

        Raises:
            NotCaptured: One depends on a tensor that is no parameter of the module.
        """
        known = {id(leaf): place for place, leaf in enumerate(leaves)}
        found: list[set[int]] = []
        for output in self._outputs:
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
        leaves = [nn.Parameter(one.detach()) for one in self._trained]
        instead = {id(one): leaf for one, leaf in zip(self._trained, leaves, strict=True)}
        if self.parameters:
            self._standing = [instead[id(one)] for one in self.parameters]
        parts = list(self._module.modules())
        held: list[tuple[dict[str, Any], str, Any]] = [
            (part._parameters, *item) for part in parts for item in part._parameters.items()
        ]
        for part in parts:
            if isinstance(part, nn.RNNBase):  # keeps lists of its parameters, and weak references
                flat = [instead.get(id(one), one) for one in part._flat_weights]
                refs = [None if one is None else weakref.ref(one) for one in flat]
                held += [
                    (vars(part), name, vars(part)[name]) for name in ("_flat_weights", "_flat_weight_refs")
                ]
                vars(part).update(_flat_weights=flat, _flat_weight_refs=refs)
        for table, name, one in held:  # two names may be one parameter
            if id(one) in instead:
                table[name] = instead[id(one)]
        try:
            yield leaves
        finally:
            for table, name, one in held:
                table[name] = one
            self._standing = []

    # ------------------------------------------------------------ running
    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The outputs of a call, with its graph.

        Args:
            tensors: Tensors among the leaves of the arguments.
        """
        made: Sequence[Tensor]
        if self._backwards:
            made = _CallNode.apply(self, tensors, *self.parameters)  # type: ignore[no-untyped-call]
        else:
            made = self._count(tensors)
        return unflatten([made[one] if type(one) is _Place else one for one in self._places], self._tree)

    def _count(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs, as of `forward`; torch counts the writes to buffers."""
        made = self.forward(tensors)
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)
        return made

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, each once, without a graph; buffers change."""
        assert self._forward is not None
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(tensors))
        self._forward.replay()
        return [one.clone() for one in self._outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters, in new memory.

        Args:
            gradients: Of each output, behind its forward; None: it has none.
        """
        pattern = Pattern(place for place, one in enumerate(gradients) if one is not None)
        if not pattern:
            return [None] * len(self.parameters)
        whole = next(iter(self._backwards))
        graph, found = self._backwards.get(pattern) or self._backwards[whole]
        if pattern not in self._backwards:
            self.others.add(pattern)
            torch._foreach_zero_([self._gradient(place) for place in whole - pattern])
        places = sorted(pattern)
        given = [one for one in gradients if one is not None]
        torch._foreach_copy_([self._gradient(place) for place in places], given)
        graph.replay()
        needed = set().union(*(self._needs[place] for place in places))
        is_there = [one is not None and place in needed for place, one in enumerate(found)]
        # One launch for many, where clones are one for each.
        chosen = [one for one, is_taken in zip(found, is_there, strict=True) if one is not None and is_taken]
        made = iter(torch._foreach_mul(chosen, 1.0) if chosen else ())
        return [next(made) if is_taken else None for is_taken in is_there]

    def eager(self, gradients: Callable[[int, Tensor], Tensor]) -> dict[Pattern, list[Tensor | None]]:
        """The gradients of the parameters by the user's Python, of the last call's inputs, for each pattern.

        Args:
            gradients: Makes the gradient of an output, of its place and itself.
        """
        kept = self._outputs, self._places, self._tree
        try:
            with self._standing_in():
                self._call()
                given = [gradients(*item) for item in enumerate(self._outputs)]
                return {pattern: list(self._differentiate(pattern, given)) for pattern in self.patterns}
        finally:
            self._outputs, self._places, self._tree = kept

    def _gradient(self, place: int) -> Tensor:
        gradient = self._gradients[place]
        assert gradient is not None
        return gradient


class _Place(int):
    """The place of a leaf among the outputs."""


class _CallNode(torch.autograd.Function):
    """The node of a call in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, graphs: CallGraphs, tensors: Sequence[Tensor], *_parameters: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        outputs = graphs._count(tensors)
        plain = zip(outputs, graphs._gradients, strict=True)
        ctx.mark_non_differentiable(*(one for one, gradient in plain if gradient is None))
        ctx.save_for_backward(*graphs._saved)  # so torch tells of a write in between
        ctx.graphs, ctx.use = graphs, _Use()
        graphs._use = weakref.ref(ctx.use)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graphs: CallGraphs = ctx.graphs
        if torch.is_grad_enabled():
            raise FlowdpError(TWICE)
        if ctx.use is None:
            raise RuntimeError(AGAIN)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if is_kept and graphs._is_compiled:
            raise FlowdpError(RETAINED)
        ctx.saved_tensors  # noqa: B018 - raises where one has been written to
        made = graphs.backward(gradients)
        if not is_kept:
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
