"""Gradients of gradients of a call: for each order one more node of the caller's graph.

A backward with `create_graph=True` gives each rank's gradients a graph of their own, in the thread of the
rank. They come out of a node in the caller's graph; its inputs are the tensors of the caller from which the
ranks' graphs began, and the gradients that came in. So its own backward walks the graphs of all ranks at
once, too, and makes the node of the next order where it is asked to.

How tensors are cut, joined and summed is no matter of these nodes: their inputs and outputs are each rank's
own, and ordinary operations of the caller's graph lie in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.gradient_sum import Gradients
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.copies import carry, move

__all__ = ["RankGraph", "differentiate", "retains_graph"]


@dataclass(frozen=True, slots=True)
class RankGraph:
    """The graph of one rank, between tensors of the caller.

    Attributes:
        inputs: The caller's.
        leaves: Their counterparts at the begin of the rank's graph. Shape (inputs,).
        outputs: Tensors at its end.
        asked: Flag per leaf: it has a gradient. Shape (inputs,).
        walking: Makes the context in which the rank's thread walks the graph.
    """

    inputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    asked: tuple[bool, ...]
    walking: Callable[[], AbstractContextManager[None]]


def retains_graph() -> bool:
    """Whether the backward that is under way keeps its graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def differentiate(
    replicas: Replicas, graphs: Sequence[RankGraph | None], gradients: Sequence[Sequence[Tensor | None]]
) -> list[Gradients | None]:
    """The gradients of all ranks' graphs with regard to their inputs, as a node of the caller's graph.

    Args:
        replicas: The ranks.
        graphs: One per rank; None: the rank has none.
        gradients: Those of each graph's outputs, in the caller's graph, on any device.

    Returns:
        For each rank the gradients of its inputs, each on its input's device; None where there is none.

    Streams:
        As `Replicas.each`.
    """
    step = _Differentiation(replicas, graphs, gradients)
    found = iter(_Node.apply(step, *step.inputs))  # type: ignore[no-untyped-call]
    return [None if has is None else [next(found) if one else None for one in has] for has in step.has]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Differentiation, *_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        outputs, is_constant = step.forward()
        ctx.mark_non_differentiable(
            *(o for o, constant in zip(outputs, is_constant, strict=True) if constant)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.step.backward(gradients, retains_graph()))


class _Differentiation:
    """One order: from the graphs of the order before to the graphs of their gradients.

    Attributes:
        inputs: Inputs of the node: those of the graphs, and the gradients of their outputs.
        has: For each rank, flag per input of its graph: it has a gradient. None without a graph.
    """

    def __init__(
        self,
        replicas: Replicas,
        graphs: Sequence[RankGraph | None],
        gradients: Sequence[Sequence[Tensor | None]],
    ) -> None:
        self.has: list[list[bool] | None] = [None] * len(graphs)
        self._replicas = replicas
        self._graphs = list(graphs)
        self._gradients = [list(own) for own in gradients]
        self._next: list[RankGraph | None] = [None] * len(graphs)
        self._is_freed = False
        self.inputs: list[Tensor] = []
        for graph, own in zip(graphs, gradients, strict=True):
            if graph is not None:
                self.inputs += [*graph.inputs, *_given(graph, own)]

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        found = self._replicas.each(
            [
                None if graph is None else partial(self._forward, rank)
                for rank, graph in enumerate(self._graphs)
            ]
        )
        outputs: list[Tensor] = []
        is_constant: list[bool] = []
        for answer in found:
            if answer is not None:
                outputs += answer[0]
                is_constant += answer[1]
        # The graphs of the order before stay alive in those of this one.
        self._graphs, self._gradients = [], []
        return outputs, is_constant

    def _forward(self, rank: int) -> tuple[list[Tensor], list[bool]]:
        graph, gradients = self._graphs[rank], self._gradients[rank]
        assert graph is not None
        given = _given(graph, gradients)
        seeds = [_leaf(gradient, like) for like, gradient in _pairs(graph, gradients)]
        outputs = [output for output, _ in _pairs(graph, gradients)]
        with torch.enable_grad():  # inside a node they are off
            found = _slopes(graph, outputs, seeds, create_graph=True)
        self.has[rank] = [one is not None for one in found]
        own = tuple(one for one in found if one is not None)
        leaves = (*graph.leaves, *(seed for seed in seeds if seed.requires_grad))
        inputs = (*graph.inputs, *given)
        self._next[rank] = RankGraph(inputs, leaves, own, (True,) * len(inputs), graph.walking)
        homes = [i for i, one in zip(graph.inputs, found, strict=True) if one is not None]
        return _brought(own, homes), [not one.requires_grad for one in own]

    def backward(self, gradients: Sequence[Tensor | None], keep: bool) -> Gradients:
        if self._is_freed:
            raise RuntimeError(
                "backward a second time through gradients that flowdp made: their graph is freed; give the "
                "first backward retain_graph=True"
            )
        rest = iter(gradients)
        of_ranks = [[] if graph is None else [next(rest) for _ in graph.outputs] for graph in self._next]
        if torch.is_grad_enabled():
            answers = differentiate(self._replicas, self._next, of_ranks)
        else:
            answers = self._replicas.each(
                [
                    None if graph is None else partial(_walk, graph, own)
                    for graph, own in zip(self._next, of_ranks, strict=True)
                ]
            )
        if not keep:
            self._next, self._is_freed = [], True
        return [one for answer in answers if answer is not None for one in answer]


def _walk(graph: RankGraph, gradients: Sequence[Tensor | None]) -> Gradients:
    """The gradients of a graph's inputs, as numbers."""
    outputs = [output for output, _ in _pairs(graph, gradients)]
    seeds = [move(gradient.detach(), output.device) for output, gradient in _pairs(graph, gradients)]
    return _brought(_slopes(graph, outputs, seeds, create_graph=False), graph.inputs)


def _slopes(
    graph: RankGraph, outputs: Sequence[Tensor], seeds: Sequence[Tensor], *, create_graph: bool
) -> Gradients:
    """The gradients of all leaves; None for those that are not asked for, or have no part in it."""
    leaves = [leaf for leaf, is_asked in zip(graph.leaves, graph.asked, strict=True) if is_asked]
    if not outputs or not leaves:
        return [None] * len(graph.leaves)
    # The graph shares parts with that of the call, which may still be walked: it is freed by letting it go.
    with graph.walking():
        found = torch.autograd.grad(
            outputs, leaves, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    rest = iter(found)
    return [next(rest) if is_asked else None for is_asked in graph.asked]


def _pairs(graph: RankGraph, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The outputs that have a gradient and a graph, and the gradients."""
    return [
        (output, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]


def _given(graph: RankGraph, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for _, gradient in _pairs(graph, gradients) if gradient.requires_grad]


def _leaf(gradient: Tensor, like: Tensor) -> Tensor:
    return move(gradient.detach(), like.device).requires_grad_(gradient.requires_grad)


def _brought(found: Sequence[Any], homes: Sequence[Tensor]) -> list[Any]:
    """Gradients without a graph, on the devices of the tensors that they belong to."""
    bare = [None if one is None else one.detach() for one in found]
    for device in {home.device for home in homes}:
        own = [place for place, home in enumerate(homes) if home.device == device]
        for place, moved in zip(own, carry([bare[p] for p in own], device), strict=True):
            bare[place] = moved
    return bare
