"""Tests of optimizers rebuilt for other parameters: copied attributes, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.utils._pytree import tree_leaves

import flowdp
from flowdp.errors import OptionError
from flowdp.replica.optimizer_copy import load_state, rebuild


class Scaled(torch.optim.SGD):
    """Multiplies all gradients by a factor that is an attribute, not an option of the groups."""

    scale = 1.0

    def __init__(self, params: Any, lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor
        self.calls = {"steps": [0]}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.factor * self.scale)
        return super().step(closure)


def pair() -> tuple[nn.Linear, nn.Linear]:
    model = nn.Linear(2, 2)
    return model, copy.deepcopy(model)


# ---------------------------------------------------------------- attributes
def test_attributes_are_copied() -> None:
    model, twin = pair()
    optimizer = Scaled(model.parameters(), factor=3.0)
    optimizer.scale = 0.5
    optimizer.calls["steps"].append(1)
    made: Any = rebuild(optimizer, twin, model)
    assert (made.factor, made.scale, made.calls) == (3.0, 0.5, {"steps": [0, 1]})
    assert made.calls["steps"] is not optimizer.calls["steps"]


def test_attributes_of_the_model_become_those_of_the_replica() -> None:
    model, twin = pair()
    model.register_buffer("mean", torch.zeros(2))
    twin.register_buffer("mean", torch.zeros(2))
    optimizer: Any = Scaled(model.parameters())
    optimizer.sums = {model.weight: torch.ones(2, 2)}
    optimizer.model, optimizer.mean, optimizer.again = model, model.mean, optimizer.step
    made: Any = rebuild(optimizer, twin, model)
    assert torch.equal(made.sums[twin.weight], torch.ones(2, 2))
    assert made.model is twin
    assert made.mean is twin.mean
    assert made.again.__self__ is made


def test_methods_of_its_own_are_refused_and_a_schedulers_are_not() -> None:
    model, twin = pair()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" not in vars(rebuild(optimizer, twin, model))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step = lambda closure=None: None
    with pytest.raises(OptionError, match=r"SGD has a step\(\) of its own.* subclass of SGD, or .*factory"):
        rebuild(optimizer, twin, model)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_steps_as_the_instance_does(devices: int) -> None:
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(1)).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    model = nn.Linear(2, 2).double()
    plain = copy.deepcopy(model)
    optimizer = Scaled(model.parameters(), factor=0.25)
    flowdp.Trainer(
        model,
        optimizer,
        loss,
        dataset=(x,),
        per_device_batch_size=16 // devices,
        batch_size=16,
        epochs=3,
        policy="exact",
        devices=["cpu"] * devices,
        progress=False,
    ).fit()
    own = Scaled(plain.parameters(), factor=0.25)
    for _ in range(3):
        own.zero_grad()
        loss(plain, (x,)).backward()
        own.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-12, atol=1e-12)


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
