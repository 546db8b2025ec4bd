"""A call that several devices do together, as one node of the caller's graph.

The node's inputs are the module's tensors that require grad and the parts of the arguments; its outputs are
those of the devices. Cutting and joining are ordinary operations of the caller's graph around it. Inside,
each device has a graph of its own, made and walked by the thread of its rank. (A graph that spans CPU devices
would be walked by one thread.) The node keeps all that its backward needs, so nothing that happens to the
module between a forward and its backward matters but what torch counts as a write to a saved tensor.

A backward with `create_graph` is one more such node, whose inputs are those of the first one and the
gradients that came in, and whose own backward is one more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import Gradients, added, has_hooks
from flowdp.data.trees import flatten, tensors_of, unflatten
from flowdp.data_parallel.cut import Part
from flowdp.data_parallel.device_copies import Copying, Packed, Reducing
from flowdp.data_parallel.replicas import Isolated, Replicas
from flowdp.device.copies import move
from flowdp.errors import FlowdpError
from flowdp.modules.shallow import CONTAINERS, SHARED

__all__ = ["Around", "Graphs", "Run", "call_parts"]

Run = Callable[[nn.Module, Part], Any]
"""Calls a module with its part of the arguments."""

Around = Callable[[], AbstractContextManager[object]]


def call_parts(
    replicas: Replicas,
    parts: Sequence[Part],
    run: Run,
    *,
    isolated: Isolated | None = None,
    guards: bool = False,
    around: Around | None = None,
) -> list[Any]:
    """Call the modules with their parts, all ranks at once.

    Args:
        replicas: The modules.
        parts: In the order of the outputs. A rank does its own one after another.
        run: Calls a module.
        isolated: Prepares replicas whose forwards leave no trace; see `Replicas.follow`.
        guards: Whether a backward through a tensor that the first device's forward leaves in an attribute is
            an error.
        around: Makes a context for the work of each rank, in forward and backward.

    Returns:
        The return value for each part, its tensors on the first device and in the caller's graph.

    Raises:
        FlowdpError: The module wrote to an argument that cannot be written to.

    Streams:
        As `Replicas.each`, in forward and in backward.
    """
    has_graph = torch.is_grad_enabled()
    wanted = replicas.wanted(isolated) if has_graph else []
    with ExitStack() as stack:
        if has_hooks(wanted) or not all(tensor.is_leaf for tensor in wanted):
            # The devices' graphs end at leaves without hooks.
            leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in wanted}
            stack.enter_context(replicas.standing_in(leaves))
        replicas.follow(isolated)
        known = [pair for part in replicas.module.modules() for pair in vars(part).items()] if guards else []
        before = {id(tensor) for pair in known for tensor in _graph_tensors(*pair)}
        given = [
            part.replaced(
                [
                    _begin(*pair, replicas.devices[part.rank])
                    for pair in zip(part.tensors, part.is_cut, strict=True)
                ]
            )
            for part in parts
        ]
        writes = _Writes(parts, given)
        containers = [_contents(part) for part in given] if guards else []
        graphs = _graphs(replicas, given, around)
        inputs = [*wanted, *(t for part in parts for t in part.tensors if t.requires_grad and has_graph)]
        outputs: list[tuple[list[Any], Any]] = [([], None)] * len(parts)
        forward = partial(_forward, replicas, given, run, outputs)
        made = graphs.run(forward, inputs)
    graphs.watched = writes.settle()
    if has_graph:
        replicas.check_flags()
    if guards:
        replicas.check_parts()
        _check_containers(containers, given, outputs)
        if has_graph:
            _guard(replicas.module, before)
    rest = [iter(own) for own in made]
    return [
        unflatten([next(rest[part.rank]) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
        for part, (leaves, form) in zip(parts, outputs, strict=True)
    ]


def _graphs(replicas: Replicas, parts: Sequence[Part], around: Around | None) -> Graphs:
    """The graphs of a call, before it is made: from the module's tensors and the parts' own."""
    ranks = range(len(replicas.modules))
    busy = [any(part.rank == rank for part in parts) for rank in ranks]
    shared = len(replicas.trained()) if torch.is_grad_enabled() else 0
    leaves = [replicas.trained(rank)[:shared] if busy[rank] else [] for rank in ranks]
    places = [list(range(len(own))) for own in leaves]
    number = shared
    for part in parts:
        for tensor in part.tensors:
            if tensor.requires_grad:
                leaves[part.rank].append(tensor)
                places[part.rank].append(number)
                number += 1
    return Graphs(replicas, leaves, places, busy, shared, around)


def _forward(
    replicas: Replicas,
    parts: Sequence[Part],
    run: Run,
    outputs: list[tuple[list[Any], Any]],
    rank: int,
) -> list[Tensor]:
    """A rank's forwards; returns the tensors among their outputs, which go to `outputs`."""
    made: list[Tensor] = []
    for place, part in enumerate(parts):
        if part.rank != rank:
            continue
        try:
            outputs[place] = flatten(replicas.call(rank, part.samples, run, part))
        except RuntimeError as error:
            if "used in an in-place operation" in str(error):
                raise FlowdpError(
                    f"the module wrote to an argument that asks for a gradient; {COPY}"
                ) from error
            raise
        made += [leaf for leaf in outputs[place][0] if isinstance(leaf, Tensor)]
    return made


COPY = "setup() cannot follow a write to such an argument: let the module write to a copy, argument.clone()"


def _begin(tensor: Tensor, is_cut: bool, device: torch.device) -> Tensor:
    """The begin of a device's graph: the memory of a tensor of the caller's, or a copy of it there."""
    if tensor.requires_grad:
        return move(tensor.detach(), device).requires_grad_(torch.is_grad_enabled())
    # With a count of writes of its own: those of another device to its part do not matter to this one.
    return move(tensor.data if is_cut else tensor, device)


class _Writes:
    """A look at what modules write to their arguments.

    Args:
        parts: Arguments in the caller's memory, part by part.
        given: The same on the devices.
    """

    def __init__(self, parts: Sequence[Part], given: Sequence[Part]) -> None:
        counts: dict[int, int] = {}
        for part in parts:
            for tensor in part.tensors:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
        self._seen = [
            (tensor, piece, piece._version, counts[id(tensor)] > 1)
            for part, own in zip(parts, given, strict=True)
            for tensor, piece in zip(part.tensors, own.tensors, strict=True)
            if not piece.is_inference()
        ]

    def settle(self) -> list[tuple[Tensor, int, Tensor]]:
        """Count the writes as the caller's tensors', and bring those to copies back.

        Returns:
            The caller's tensors, torch's counts of writes to them, and what the devices have of them.

        Raises:
            FlowdpError: A tensor was written to that several devices have, or that asks for a gradient.
        """
        written = [one for one in self._seen if one[1]._version != one[2]]
        for tensor, piece, _, is_shared in written:
            if is_shared or piece.requires_grad:
                why = "goes whole to several devices" if is_shared else "asks for a gradient"
                raise FlowdpError(
                    f"the module wrote to an argument of shape {tuple(tensor.shape)} that {why}; {COPY}"
                )
            if piece.device != tensor.device:
                with torch.no_grad():
                    tensor.copy_(piece, non_blocking=True)
            elif piece is not tensor:
                torch.autograd.graph.increment_version([tensor])
        return [(tensor, tensor._version, piece) for tensor, piece, *_ in self._seen]


def _contents(part: Part) -> tuple[list[Any], list[Any]]:
    """The leaves and the forms of a part's arguments."""
    flat = [flatten(value) for value in (*part.args, *part.kwargs.values())]
    return [leaf for leaves, _ in flat for leaf in leaves], [form for _, form in flat]


def _check_containers(
    before: Sequence[tuple[list[Any], Any]], parts: Sequence[Part], outputs: Sequence[tuple[list[Any], Any]]
) -> None:
    """Check that the module has left the containers among its arguments as they were, or returns what is new.

    Raises:
        FlowdpError: It has not: each device has others than the caller.
    """
    for (known, known_form), part, (returned, _) in zip(before, parts, outputs, strict=True):
        leaves, form = _contents(part)
        new = set(map(id, leaves)).difference(map(id, known))
        is_changed = form != known_form or any(map(is_not, leaves, known))
        if is_changed and not (new and new.issubset(map(id, returned))):  # as the cache of a language model
            raise FlowdpError(
                "the module changed a list, dict or other container among its arguments, and each device "
                "does so for its part: let it return what it has put there"
            )


_walk = threading.local()
"""Has `is_inside` in a thread that walks the graph of a device."""


def _guard(module: nn.Module, before: set[int]) -> None:
    """Refuse walks from outside to tensors that the first device's forward has left in attributes."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            for tensor in _graph_tensors(key, value):
                if id(tensor) not in before:
                    tensor.register_hook(partial(_refuse, f"{name}.{key}".removeprefix(".")))


def _graph_tensors(key: str, value: Any) -> list[Tensor]:
    """The tensors with a graph in an attribute, or in its list, tuple, dict or set."""
    if key in SHARED or not isinstance(value, (Tensor, *CONTAINERS)):
        return []
    return [tensor for tensor in tensors_of(value) if tensor.grad_fn is not None]


def _refuse(name: str, _gradient: Tensor) -> None:
    if not getattr(_walk, "is_inside", False):
        raise FlowdpError(
            f"the attribute {name!r} has been set by a forward that several devices did, and is that of the "
            "first device's part of the batch, so its gradient is not that of the whole batch: return it "
            "from forward, or detach it"
        )


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, forward: Job, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = graphs.make(forward)
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        detached = [move(tensor.detach(), graphs.home) for tensor in outputs]
        pairs = zip(detached, outputs, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, inner in pairs if not inner.requires_grad))
        return tuple(detached)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        asked = _asked(ctx.next_functions)
        if torch.is_grad_enabled():
            return (None, None, *ctx.graphs.differentiate(gradients, asked, ctx.saved_tensors))
        return (None, None, *ctx.graphs.backward(gradients, asked, keep))


def _asked(edges: Sequence[tuple[Any, int]]) -> list[bool]:
    """Whether the backward under way asks for the gradient of each input of a node."""

    def is_asked(node: Any) -> bool:
        try:
            return node is not None and bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch's answer for a leaf that autograd.grad() was given
            return True

    return [is_asked(node) for node, _ in edges]


Job = Callable[[int], list[Tensor]]
"""Makes the outputs of a rank, in its thread."""


class Graphs:
    """The graphs of the devices between inputs and outputs of a node.

    Args:
        replicas: Runs the ranks.
        leaves: Tensors at the begin of each rank's graph; those of a rank without work are empty.
        places: The input that each of them stands for.
        busy: Flag per rank: it has work.
        shared: Number of inputs that all ranks have, the first ones; their gradients are summed.
        around: Makes a context for the work of each rank.

    Attributes:
        home: The first device, which has the outputs.
        watched: Tensors of the caller's, torch's counts of writes to them, and tensors in the same memory
            that the graphs may have saved.
    """

    def __init__(
        self,
        replicas: Replicas,
        leaves: Sequence[Sequence[Tensor]],
        places: Sequence[Sequence[int]],
        busy: Sequence[bool],
        shared: int,
        around: Around | None,
    ) -> None:
        self._replicas = replicas
        self._leaves = [list(own) for own in leaves]
        self._places = [list(own) for own in places]
        self._busy = list(busy)
        self._shared = shared
        self._around = around
        self._modes = replicas.modes()  # inside a node, autograd has switched gradients off
        self.home = replicas.devices[0]
        self._homes: list[torch.device] = []
        self._walks = False
        self._counts: list[int] = []
        self._outputs: list[list[Tensor]] | None = None
        self._is_shared = False  # with graphs of its gradients
        self.watched: list[tuple[Tensor, int, Tensor]] = []

    @property
    def ends(self) -> list[Any]:
        """The last nodes of the graphs."""
        return [one.grad_fn for own in self._outputs or () for one in own if one.grad_fn is not None]

    def run(self, forward: Job, inputs: Sequence[Tensor], *, walks: bool = False) -> list[list[Tensor]]:
        """The outputs of each rank, in the caller's graph.

        Args:
            forward: Makes them.
            inputs: Inputs of the node.
            walks: Whether it walks other graphs.
        """
        self._walks = walks
        self._homes = [tensor.device for tensor in inputs]
        if inputs:
            made: Sequence[Tensor] = _Node.apply(self, forward, *inputs)  # type: ignore[no-untyped-call]
        else:
            made = [move(tensor, self.home) for tensor in self.make(forward)]
        rest = iter(made)
        return [[next(rest) for _ in range(count)] for count in self._counts]

    def make(self, forward: Job) -> list[Tensor]:
        """The outputs of all ranks, each in the graph of its device."""
        jobs = self._jobs(forward)
        found = self._replicas.each(
            jobs, self._modes, self._parts, draws=not self._walks, walks=self._walks, around=self._around
        )
        outputs = [own or [] for own in found]
        self._counts = [len(own) for own in outputs]
        if any(tensor.requires_grad for own in outputs for tensor in own):
            self._outputs = outputs
        return [tensor for own in outputs for tensor in own]

    def backward(self, gradients: Sequence[Tensor | None], asked: Sequence[bool], keep: bool) -> Gradients:
        """The gradients of the inputs; None for those that are not asked for."""
        replicas = self._replicas
        with self._turn():
            seeds = self._seeds(gradients)
            is_whole = all(self._busy) and any(asked[: self._shared])
            carrier = replicas.carrier(self._leaves[0][: self._shared], is_whole=is_whole)
            written = [own for tensor, version, own in self.watched if tensor._version != version]
            torch.autograd.graph.increment_version(written)  # so that torch finds them in the graphs
            walk = partial(self._walked, seeds, asked, keep or self._is_shared, carrier)
            found = replicas.each(
                self._jobs(walk), None, self._parts, draws=False, walks=True, around=self._around
            )
            if not keep:  # the copies of parameters go, too
                self._outputs, self._leaves, self.watched = None, [], []
            with replicas.summing.running():
                summed = carrier.sum([answer[0] for answer in found if answer is not None])
        total: Gradients = [*summed, *[None] * (len(asked) - len(summed))]
        for answer in found:
            for place, gradient in answer[1] if answer is not None else ():
                if gradient is not None:
                    own, known = move(gradient, self._homes[place]), total[place]
                    total[place] = own if known is None else known + own  # ranks may have one seed in common
        return total

    def differentiate(
        self, gradients: Sequence[Tensor | None], asked: Sequence[bool], inputs: Sequence[Tensor]
    ) -> Gradients:
        """The gradients of the inputs, by one more node."""
        with self._turn():
            return self._differentiate(gradients, asked, inputs)

    def _differentiate(
        self, gradients: Sequence[Tensor | None], asked: Sequence[bool], inputs: Sequence[Tensor]
    ) -> Gradients:
        self._is_shared = True
        seeds = self._seeds(gradients)
        bare = [
            [None if one is None else _begin(one, False, device) for one in own]
            for own, device in zip(seeds, self._replicas.devices, strict=True)
        ]
        more = [one for own in seeds for one in own if one is not None and one.requires_grad]
        numbers = {id(one): len(inputs) + k for k, one in enumerate(more)}
        leaves, places = [], []
        for rank, own in enumerate(seeds):
            pairs = [
                (leaf, numbers[id(one)])
                for one, leaf in zip(own, bare[rank], strict=True)
                if one is not None and leaf is not None and leaf.requires_grad
            ]
            leaves.append([*self._leaves[rank], *(leaf for leaf, _ in pairs)])
            places.append([*self._places[rank], *(place for _, place in pairs)])
        graphs = Graphs(self._replicas, leaves, places, self._busy, self._shared, self._around)
        graphs._is_shared = True  # it leads through this one
        has: dict[int, list[int]] = {}

        def forward(rank: int) -> list[Tensor]:
            found = self._walk(rank, bare, asked, keep=True)
            has[rank] = [place for place, one in found if one is not None]
            return [one for _, one in found if one is not None]

        made = graphs.run(forward, [*inputs, *more], walks=True)
        columns: list[Gradients] = []
        for rank, outputs in enumerate(made):
            column: Gradients = [None] * len(inputs)
            for place, gradient in zip(has.get(rank, ()), outputs, strict=True):
                column[place] = move(gradient, self._homes[place])
            columns.append(column)
        return added(columns)

    def _turn(self) -> AbstractContextManager[object]:
        """The turn of a backward; its caller has it in a comparison, and torch may walk in another thread."""
        return nullcontext() if self._around is not None else self._replicas.turn

    def _seeds(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The gradients of each rank's outputs."""
        if self._outputs is None:
            raise RuntimeError(
                "backward a second time through a call that flowdp did: its graph is freed; give the first "
                "backward retain_graph=True"
            )
        rest = iter(gradients)
        return [[next(rest) for _ in own] for own in self._outputs]

    def _walk(
        self, rank: int, seeds: Sequence[Sequence[Tensor | None]], asked: Sequence[bool], *, keep: bool
    ) -> list[tuple[int, Tensor | None]]:
        """Gradients of a rank's leaves that are asked for, with the inputs for which they stand."""
        assert self._outputs is not None
        pairs = zip(self._outputs[rank], seeds[rank], strict=True)
        roots = [(one, seed) for one, seed in pairs if seed is not None and one.requires_grad]
        known = zip(self._places[rank], self._leaves[rank], strict=True)
        # Torch gives none to a leaf that has been frozen since.
        ends = [(place, leaf) for place, leaf in known if asked[place] and leaf.requires_grad]
        if not roots or not ends:
            return []
        with _walking():
            found = torch.autograd.grad(
                [one for one, _ in roots],
                [leaf for _, leaf in ends],
                [move(seed, one.device) for one, seed in roots],
                retain_graph=keep,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        return [(place, one) for (place, _), one in zip(ends, found, strict=True)]

    def _walked(
        self,
        seeds: Sequence[Sequence[Tensor | None]],
        asked: Sequence[bool],
        keep: bool,
        carrier: Copying | Reducing,
        rank: int,
    ) -> tuple[Packed, list[tuple[int, Tensor | None]]]:
        """A rank's walk: the gradients of shared inputs on their way to the first device, and the others."""
        found = self._walk(rank, seeds, asked, keep=keep)
        shared: Gradients = [None] * self._shared
        for place, gradient in found:
            if place < self._shared:
                shared[place] = gradient
        packed = carrier.pack(shared, self._replicas.devices[rank])
        return packed, [(place, one) for place, one in found if place >= self._shared]

    @property
    def _parts(self) -> list[list[None]]:
        return [[None] if is_busy else [] for is_busy in self._busy]

    def _jobs(self, do: Callable[[int], Any]) -> list[Callable[[], Any] | None]:
        return [partial(do, rank) if is_busy else None for rank, is_busy in enumerate(self._busy)]


@contextmanager
def _walking() -> Iterator[None]:
    """Context of a walk through a device's graph, with a remedy for an error."""
    _walk.is_inside = True
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise FlowdpError(
                "torch.utils.checkpoint inside a model of setup() needs use_reentrant=False: with True it "
                "starts a backward of its own, which cannot be told where to end"
            ) from None
        raise
    finally:
        _walk.is_inside = False
