"""Tests of optimizers rebuilt for other parameters: copied attributes, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.errors import OptionError
from flowdp.replica.optimizer_rebuild import rebuild


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
