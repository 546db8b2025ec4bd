"""Tests of an optimizer's state loaded by another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.utils._pytree import tree_leaves

from flowdp.replica.optimizer_state import load_state


def stepped(
    make: Callable[..., Optimizer], seed: int, steps: int, dtype: torch.dtype
) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(dtype)
    optimizer: Any = make(module.parameters())
    for _ in range(steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(torch.randn(4, 3, dtype=dtype)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return module, optimizer


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # by torch 2.8's LBFGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.1), lambda p: LBFGS(p, 0.1, max_iter=2)],
    ids=["momentum", "adam", "lbfgs"],
)
def test_it_steps_on_as_the_other_would(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    _, theirs = stepped(make, 1, 3, dtype)
    module, own = stepped(make, 2, 5, dtype)
    for state in theirs.state.values():  # wider than its parameter, like master copies
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].double() + 1e-9
    load_state(own, theirs.state_dict(), with_groups=False)
    mine, others = tree_leaves(list(own.state.values())), tree_leaves(list(theirs.state.values()))
    assert len(mine) == len(others) > 0
    for leaf, other in zip(mine, others, strict=True):
        if isinstance(leaf, Tensor):
            assert leaf.dtype == other.dtype
            assert torch.equal(leaf, other)
            assert leaf.data_ptr() != other.data_ptr()
        else:
            assert leaf == other
    assert set(own.state) <= set(module.parameters())


def test_groups_and_rates_stay() -> None:
    _, theirs = stepped(lambda p: Adam(p, 0.1), 1, 1, torch.float32)
    _, own = stepped(lambda p: Adam(p, 0.2), 1, 1, torch.float32)
    groups = own.param_groups
    load_state(own, theirs.state_dict(), with_groups=False)
    assert own.param_groups is groups
    assert groups[0]["lr"] == 0.2


def test_each_tensor_goes_where_torch_keeps_it() -> None:
    """Adam counts its steps on the host, wherever the parameters are."""
    there = torch.device("meta")
    _, theirs = stepped(lambda p: Adam(p, 0.1), 1, 2, torch.float32)
    own = Adam([p.detach().to(there).requires_grad_() for g in theirs.param_groups for p in g["params"]], 0.1)
    load_state(own, theirs.state_dict(), with_groups=False)
    for state in own.state.values():
        assert state["exp_avg"].device == there
        assert state["step"].device.type == "cpu"
