"""Tests of functions made of recorded graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from flowdp.graphs.base import NotCaptured
from flowdp.graphs.lowering import Inputs, lower

aten = torch.ops.aten


def test_without_torchscript_a_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")
    with pytest.raises(NotCaptured, match="TorchScript"):
        lower(fx.Graph())


def recorded() -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A recorded function of a parameter w, a leaf x and a share: results w * x * share and x, gradient x."""
    graph = fx.Graph()
    w, x, share, _ = (graph.placeholder(f"input_{k}") for k in range(4))
    product = graph.call_function(aten.mul.Tensor, (w, x))
    weighed = graph.call_function(aten.mul.Tensor, (product, share))
    seen = graph.call_function(aten.detach.default, (x,))
    gradient = graph.call_function(aten.mul.Tensor, (x, share))
    return graph, [weighed, seen], [gradient]


@pytest.mark.parametrize("gives", [True, False])
def test_gradients_are_returned_or_added(gives: bool) -> None:
    graph, results, gradients = recorded()
    w, x, share = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor(0.5)
    inputs = Inputs(graph, nn.Module(), [w], gives=gives)
    assert inputs.rewrite(results, gradients) == ([], False)
    there = [torch.tensor([10.0])]
    into: list[list[Tensor]] = [] if gives else [there]
    weighed, seen, *given = lower(graph)([w], *into, [x], share, share)
    assert (float(weighed), float(seen)) == (3.0, 3.0)
    assert [float(one) for one in given] == ([1.5] if gives else [])
    assert float(there[0]) == (10.0 if gives else 11.5)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_parameter_from_elsewhere_is_read_where_it_is_unless_it_is_trained(is_trained: bool) -> None:
    root = nn.Module()
    root.other = nn.Parameter(torch.tensor([7.0]), requires_grad=is_trained)
    graph = fx.Graph()
    w, x, _, _ = (graph.placeholder(f"input_{k}") for k in range(4))
    made = graph.call_function(aten.mul.Tensor, (x, graph.get_attr("other")))
    inputs = Inputs(graph, root, [torch.ones(1)], gives=True)
    if is_trained:
        with pytest.raises(NotCaptured, match="past the model"):
            inputs.rewrite([made], [w])
        return
    constants, _ = inputs.rewrite([made], [w])
    assert constants == [root.other]
    number = torch.ones(())
    own = [torch.ones(1), root.other.detach()]
    assert float(lower(graph)(own, [torch.tensor([2.0])], number, number)[0]) == 14.0
