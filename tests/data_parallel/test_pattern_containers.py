"""Containers among the arguments of a call, into which a forward puts what it makes."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp


class Puts(nn.Module):
    """Puts a loss into a container of the caller's, and may return it, too."""

    def __init__(self, *, returns: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.returns = returns

    def forward(self, x: Tensor, into: Any) -> Any:
        y = self.linear(x)
        penalty = y.square()
        if isinstance(into, list):
            into.append(penalty)
        elif isinstance(into, SimpleNamespace):
            into.penalty = penalty
        else:
            into["penalty"] = penalty
        return (y, penalty) if self.returns else y


@pytest.mark.parametrize("made", [list, dict, SimpleNamespace, lambda: defaultdict(list)])
def test_tensors_that_forward_puts_into_a_container_of_the_callers(made: Any) -> None:
    with (
        flowdp.setup(Puts(), devices=["cpu", "cpu"], progress=False) as dp,
        pytest.raises(flowdp.FlowdpError, match=r"puts tensors into a list, dict .* let it return them"),
    ):
        dp(torch.randn(8, 3), made())


def test_those_that_it_returns_as_well_are_the_callers_to_take() -> None:
    with flowdp.setup(Puts(returns=True), devices=["cpu", "cpu"], progress=False) as dp:
        x = torch.randn(8, 3)
        y, penalty = dp(x, [])
        torch.testing.assert_close(penalty, dp.module.linear(x).square())
        assert y.shape == (8, 2)
