"""Tests of derivatives that a call on several devices would lose: they are errors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import flowdp
from flowdp.errors import FlowdpError


class Net(nn.Module):
    """Uses any arguments in `extra`."""

    def __init__(self, extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(3, 3), nn.Linear(3, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.extra(self.first(x)))


def setup(net: nn.Module, **options: Any) -> Any:
    return flowdp.setup(net, devices=["cpu"] * 2, progress=False, **options)


def test_a_trained_module_elsewhere() -> None:
    other = nn.Linear(3, 3)
    with setup(Net(lambda x: other(x))) as dp:
        with torch.no_grad():
            dp(torch.ones(4, 3))
        with pytest.raises(FlowdpError, match=r"shape \(3(, 3)?\) that requires grad and is neither"):
            dp(torch.ones(4, 3))
        other.requires_grad_(False)
        dp(torch.ones(4, 3)).sum().backward()
    with setup(Net(lambda x: x)) as dp, pytest.raises(FlowdpError, match="neither its parameter nor"):
        dp.call(lambda net, x: other.requires_grad_()(net(x)), torch.ones(1, 3))  # on one device it works


def test_a_loop_that_is_run_again_is_told_again() -> None:
    """As when a notebook cell with the loop is run again on the same model."""
    other = nn.Linear(3, 3)
    with setup(Net(lambda x: other(x))) as dp:
        for _ in range(6):
            with pytest.raises(FlowdpError, match="requires grad and is neither"):
                dp(torch.ones(4, 3))


def test_a_replaced_forward_that_finds_the_module_in_an_object_of_the_loop() -> None:
    net = Net(lambda x: x)
    loop = SimpleNamespace(old=net.first.forward)
    net.first.forward = lambda x: 2 * loop.old(x)  # type: ignore[method-assign]
    with (
        setup(net) as dp,
        pytest.raises(FlowdpError, match=r"a replica's forward uses a parameter .* object of the loop"),
    ):
        dp(torch.ones(4, 3))


def test_a_leaf_that_forward_has_made_passes() -> None:
    """A penalty on the gradient with respect to the input, computed inside the module."""

    def penalty(x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(own.pow(3).sum(), own, create_graph=True)
        return x * slope.mean()

    with setup(Net(penalty), check=True) as dp, torch.enable_grad():
        for _ in range(2):
            dp(torch.ones(4, 3)).sum().backward()
    common = torch.ones(3, requires_grad=True)
    with setup(Net(lambda x: x * common)) as dp, pytest.raises(FlowdpError, match="would be lost"):
        dp(torch.ones(4, 3))


def test_what_is_known_passes() -> None:
    net, x = Net(torch.tanh), torch.ones(4, 3)
    weights = {name: weight.detach().clone() * 2 for name, weight in net.named_parameters()}
    for weight in weights.values():
        weight.requires_grad_()
    with setup(net) as dp:
        slope = torch.autograd.grad(
            torch.func.functional_call(dp, weights, (x,)).sum(), weights["layer.bias"]
        )
        assert slope[0].tolist() == [4.0] * 3
        x.requires_grad_()
        dp(x + 1).sum().backward()
        assert x.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, in forward mode
def test_derivatives_that_go_through_no_graph() -> None:
    x = torch.ones(4, 3)
    with setup(Net(torch.tanh)) as dp:
        with (
            forward_ad.dual_level(),
            pytest.raises(FlowdpError, match="forward-mode differentiation does not"),
        ):
            dp(forward_ad.make_dual(x, x))
        with pytest.raises(FlowdpError, match=r"a transform of torch\.func does not"):
            torch.func.grad(lambda given: dp(given).sum())(x)
        dp(x).sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("calls", [0, 3])
def test_a_trace(calls: int) -> None:
    x = torch.ones(4, 3)
    with setup(Net(torch.tanh)) as dp:
        for _ in range(calls):
            dp(x)
        with pytest.raises(FlowdpError, match="trace the module itself"):
            torch.jit.trace(dp, x)
        assert torch.jit.trace(dp.module, x)(x).shape == (4, 3)
