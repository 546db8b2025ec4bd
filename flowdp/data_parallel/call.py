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

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data_parallel.cut import Part
from flowdp.data_parallel.gradient_sum import Gradients, GradientSum, Packed, has_hooks
from flowdp.data_parallel.replicas import Modes, Replicas
from flowdp.device.copies import move
from flowdp.device.trees import flatten, unflatten
from flowdp.policy.efficiency import Activity

__all__ = ["Graphs", "Run", "call_parts"]

Run = Callable[[nn.Module, Part], Any]
"""Calls a module with its part of the arguments."""


def call_parts(
    replicas: Replicas,
    parts: Sequence[Part],
    run: Run,
) -> list[Any]:
    """Call the modules with their parts, all ranks at once.

    Args:
        replicas: The modules.
        parts: In the order of the outputs. A rank does its own one after another.
        run: Calls a module.

    Returns:
        The return value for each part, its tensors on the first device and in the caller's graph.

    Streams:
        As `Replicas.each`, in forward and in backward.
    """
    has_graph = torch.is_grad_enabled()
    wanted = replicas.wanted() if has_graph else []
    with ExitStack() as stack:
        if has_hooks(wanted) or not all(tensor.is_leaf for tensor in wanted):
            # The devices' graphs end at leaves without hooks.
            leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in wanted}
            stack.enter_context(replicas.standing_in(leaves))
        replicas.follow()
        given = [
            part.replaced([_begin(tensor, replicas.devices[part.rank]) for tensor in part.tensors])
            for part in parts
        ]
        graphs = _graphs(replicas, given)
        inputs = [*wanted, *(t for part in parts for t in part.tensors if t.requires_grad and has_graph)]
        outputs: list[tuple[list[Any], Any]] = [([], None)] * len(parts)
        made = graphs.run(partial(_forward, replicas, given, run, outputs), inputs)
    rest = [iter(tensors) for tensors in made]
    return [
        unflatten([next(rest[part.rank]) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
        for part, (leaves, form) in zip(parts, outputs, strict=True)
    ]


def _graphs(replicas: Replicas, parts: Sequence[Part]) -> Graphs:
    """The graphs of a call, before it is made: from the module's tensors and the parts' own."""
    ranks = range(len(replicas.modules))
    busy = [any(part.rank == rank for part in parts) for rank in ranks]
    shared = len(replicas.trained()) if torch.is_grad_enabled() else 0
    ends = [list(enumerate(replicas.trained(rank)[:shared])) if busy[rank] else [] for rank in ranks]
    asking = [(part.rank, tensor) for part in parts for tensor in part.tensors if tensor.requires_grad]
    for place, (rank, tensor) in enumerate(asking, shared):
        ends[rank].append((place, tensor))
    return Graphs(replicas, ends, busy, shared)


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
        if part.rank == rank:
            outputs[place] = flatten(replicas.call(rank, part.samples, run, part))
            made += [leaf for leaf in outputs[place][0] if isinstance(leaf, Tensor)]
    return made


def _begin(tensor: Tensor, device: torch.device) -> Tensor:
    """The begin of a device's graph: the memory of a tensor of the caller's, or a copy of it there."""
    if not tensor.requires_grad:
        return move(tensor, device)
    return move(tensor.detach(), device).requires_grad_(torch.is_grad_enabled())


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

Ends = list[tuple[int, Tensor]]
"""Tensors at the begin of a rank's graph, each behind the number of the node's input that it stands for."""


class Graphs:
    """The graphs of the devices between inputs and outputs of a node.

    Args:
        replicas: Runs the ranks.
        ends: Of each rank; those of a rank without work are empty.
        busy: Flag per rank: it has work.
        shared: Number of inputs that all ranks have, the first ones; their gradients are summed.
        walks: Whether making the outputs walks other graphs.

    Attributes:
        home: The first device, which has the outputs.
    """

    def __init__(
        self,
        replicas: Replicas,
        ends: Sequence[Ends],
        busy: Sequence[bool],
        shared: int,
        *,
        walks: bool = False,
    ) -> None:
        self._replicas = replicas
        self._ends = ends
        self._busy = busy
        self._shared = shared
        self._walks = walks
        self._modes = replicas.modes()  # inside a node, autograd has switched gradients off
        self.home = replicas.devices[0]
        self._homes: list[torch.device] = []
        self._counts: list[int] = []
        self._outputs: list[list[Tensor]] | None = None
        self._is_kept = walks  # for graphs of its gradients, which lead through it

    def run(self, forward: Job, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
        """The outputs of each rank, as `forward` makes them, in the caller's graph."""
        self._homes = [tensor.device for tensor in inputs]
        if inputs:
            made: Sequence[Tensor] = _Node.apply(self, forward, *inputs)  # type: ignore[no-untyped-call]
        else:
            made = [move(tensor, self.home) for tensor in self.make(forward)]
        rest = iter(made)
        return [[next(rest) for _ in range(count)] for count in self._counts]

    def make(self, forward: Job) -> list[Tensor]:
        """The outputs of all ranks, each in the graph of its device."""
        outputs = [tensors or [] for tensors in self._each(forward, self._modes, walks=self._walks)]
        self._counts = [len(tensors) for tensors in outputs]
        if any(tensor.requires_grad for tensors in outputs for tensor in tensors):
            self._outputs = outputs
        return [tensor for tensors in outputs for tensor in tensors]

    def backward(self, gradients: Sequence[Tensor | None], asked: Sequence[bool], keep: bool) -> Gradients:
        """The gradients of the inputs; None for those that are not asked for."""
        replicas = self._replicas
        with self._replicas.turn:
            seeds = self._seeds(gradients)
            is_whole = all(self._busy) and any(asked[: self._shared])
            shared = [leaf for _, leaf in self._ends[0][: self._shared]]
            sums = replicas.gradient_sum(shared, is_whole=is_whole)
            walk = partial(self._walked, seeds, asked, keep or self._is_kept, sums)
            answers = [answer for answer in self._each(walk, None, walks=True) if answer is not None]
            if not keep:  # the copies of parameters go, too
                self._outputs, self._ends = None, []
            with replicas.summing.running(Activity.SUM):
                summed = sums.sum([packed for packed, _ in answers])
        total = [*summed, *[None] * (len(asked) - len(summed))]
        return self._added(total, [pair for _, grads in answers for pair in grads.items()])

    def differentiate(
        self, gradients: Sequence[Tensor | None], asked: Sequence[bool], inputs: Sequence[Tensor]
    ) -> Gradients:
        """The gradients of the inputs, by one more node."""
        with self._replicas.turn:
            self._is_kept = True
            seeds = self._seeds(gradients)
            more = {id(g): g for row in seeds for g in row if g is not None and g.requires_grad}
            numbers = {key: len(inputs) + place for place, key in enumerate(more)}
            ends, bare = [list(row) for row in self._ends], []
            for rank, row in enumerate(seeds):
                device = self._replicas.devices[rank]
                bare.append([None if seed is None else _begin(seed, device) for seed in row])
                known = [(numbers.get(id(seed)), leaf) for seed, leaf in zip(row, bare[-1], strict=True)]
                ends[rank] += [
                    (place, leaf) for place, leaf in known if place is not None and leaf is not None
                ]
            graphs = Graphs(self._replicas, ends, self._busy, self._shared, walks=True)
            places: dict[int, list[int]] = {}

            def forward(rank: int) -> list[Tensor]:
                known = self._walk(rank, bare, asked, keep=True).items()
                grads = {place: gradient for place, gradient in known if gradient is not None}
                places[rank] = list(grads)
                return list(grads.values())

            made = graphs.run(forward, [*inputs, *more.values()])
        pairs = [pair for rank in places for pair in zip(places[rank], made[rank], strict=True)]
        return self._added([None] * len(inputs), pairs)

    def _added(self, total: Gradients, found: Iterable[tuple[int, Tensor | None]]) -> Gradients:
        """The gradients of inputs, with those that were found for some of them, in order."""
        for place, gradient in found:
            if gradient is not None:
                moved, known = move(gradient, self._homes[place]), total[place]
                total[place] = moved if known is None else known + moved
        return total

    def _seeds(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The gradients of each rank's outputs."""
        if self._outputs is None:
            raise RuntimeError(
                "backward a second time through a call that flowdp did: its graph is freed; give the first "
                "backward retain_graph=True"
            )
        rest = iter(gradients)
        return [[next(rest) for _ in tensors] for tensors in self._outputs]

    def _walk(
        self, rank: int, seeds: Sequence[Sequence[Tensor | None]], asked: Sequence[bool], *, keep: bool
    ) -> dict[int, Tensor | None]:
        """Gradients of a rank's leaves that are asked for, by the numbers of the inputs they stand for."""
        assert self._outputs is not None
        pairs = zip(self._outputs[rank], seeds[rank], strict=True)
        roots = [(root, seed) for root, seed in pairs if seed is not None and root.requires_grad]
        # Torch gives none to a leaf that has been frozen since.
        ends = [(place, leaf) for place, leaf in self._ends[rank] if asked[place] and leaf.requires_grad]
        if not roots or not ends:
            return {}
        grads = torch.autograd.grad(
            [root for root, _ in roots],
            [leaf for _, leaf in ends],
            [move(seed, root.device) for root, seed in roots],
            retain_graph=keep,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return dict(zip([place for place, _ in ends], grads, strict=True))

    def _walked(
        self,
        seeds: Sequence[Sequence[Tensor | None]],
        asked: Sequence[bool],
        keep: bool,
        sums: GradientSum,
        rank: int,
    ) -> tuple[Packed, dict[int, Tensor | None]]:
        """A rank's walk: the gradients of shared inputs on their way to the first device, and the others."""
        gradients = self._walk(rank, seeds, asked, keep=keep)
        shared = [gradients.pop(place, None) for place in range(self._shared)]
        return sums.pack(shared, self._replicas.devices[rank]), gradients

    def _each(self, do: Callable[[int], Any], modes: Modes | None, *, walks: bool) -> list[Any]:
        """The results of the ranks that have work."""
        jobs = [partial(do, rank) if is_busy else None for rank, is_busy in enumerate(self._busy)]
        activity = Activity.BACKWARD if walks else Activity.FORWARD
        return self._replicas.each(jobs, modes, walks=walks, activity=activity)
