"""Lowering of a step's recorded graph to a function that runs without the interpreter lock.

Its inputs are put into lists, random operations get the generator of the rank, and gradients are added or
returned. `lower` makes the function; another executor can take its place there.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from flowdp.device.draws import is_random, seeded_form
from flowdp.graphs.base import NotCaptured

__all__ = ["Function", "Inputs", "lower"]

Function = Callable[..., list[Tensor]]


class Inputs:
    """Rewrites a recorded graph as one whose inputs are lists: a call hands over a few objects.

    Args:
        graph: Its inputs are the rank's tensors, those of the batch, and two numbers.
        root: Holds its constants.
        own: Tensors of the rank.
        gives: Whether it returns gradients; else it adds to those that it is given.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, own: Sequence[Tensor], *, gives: bool) -> None:
        self._graph = graph
        self._root = root
        self._own = own
        self._gives = gives
        self._constants: list[Tensor] = []
        self._draws = False

    def rewrite(
        self, results: Sequence[fx.Node], gradients: Sequence[fx.Node]
    ) -> tuple[Sequence[Tensor], bool]:
        """Rewrite the graph; returns its constants, which follow the rank's tensors, and whether it draws.

        Raises:
            NotCaptured: It reads a parameter that is not the rank's, or draws by itself.
        """
        graph = self._graph
        old = [node for node in graph.nodes if node.op == "placeholder"]
        output = graph.output((list(results), list(gradients)))
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
                    at = count + self._constant(node)
                    _replace(graph, node, graph.call_function(operator.getitem, (own, at)))
            elif node.target is torch.ops.aten.detach.default:
                kept: Any = node.args[0]
                _replace(graph, node, kept)
            elif isinstance(node.target, torch._ops.OpOverload) and is_random(
                node.target, node.args, node.kwargs
            ):
                self._draw(node, generator)
        ((results, gradients),) = output.args
        graph.erase_node(output)
        if self._gives:
            graph.output([*results, *gradients])
            graph.erase_node(into)
        else:
            graph.call_function(torch.ops.aten._foreach_add_.List, (into, list(gradients)))
            graph.output(list(results))
        graph.eliminate_dead_code(_has_effect)
        if not self._draws:
            graph.erase_node(generator)
        return self._constants, self._draws

    def _constant(self, node: fx.Node) -> int:
        tensor = getattr(self._root, str(node.target))
        storages = {one.untyped_storage().data_ptr() for one in self._own if one.numel()}
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if is_trained or tensor.untyped_storage().data_ptr() in storages:
            raise NotCaptured(
                "the loss reads a parameter past the model that is passed in; one that is not trained, as a "
                "teacher's, is no obstacle: teacher.requires_grad_(False)"
            )
        for place, one in enumerate(self._constants):
            if one is tensor:
                return place
        self._constants.append(tensor)
        return len(self._constants) - 1

    def _draw(self, node: fx.Node, generator: fx.Node) -> None:
        self._draws = True
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
