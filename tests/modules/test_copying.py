from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp.device.streams import CudaLane
from flowdp.modules.copying import CopyError, copy_module, make_replica
from tests.accelerators import FakeXpu

CPU = torch.device("cpu")
X, Y = torch.rand(32, 6, dtype=torch.float64), torch.rand(32, dtype=torch.float64)


class Features(nn.Module):
    """Reads values that hooks on its layers have kept, as a perceptual loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.kept: dict[int, Tensor] = {}
        for place in (0, 2):
            self.layers[place].register_forward_hook(self.keeper(place))

    def keeper(self, place: int) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.kept[place] = output

        return keep

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        return self.kept[0].mean(1) + self.kept[2].mean(1)


def error(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).pow(2).mean()
    return loss


@pytest.mark.parametrize("devices", [1, 2])
def test_hooks_that_hold_the_model_hold_the_copy(devices: int) -> None:
    """The hooks wrote to the user's model, and the copies read its values."""
    model = Features()
    plain = Features()
    plain.load_state_dict(model.state_dict())
    optimizer = SGD(plain.parameters(), 0.1)
    for start in range(0, 32, 8):
        optimizer.zero_grad()
        error(plain, (X[start : start + 8], Y[start : start + 8])).backward()
        optimizer.step()
    flowdp.Trainer(
        model=model,
        optimizer=lambda parameters: SGD(parameters, 0.1),
        loss=error,
        dataset=(X, Y),
        per_device_batch_size=8 // devices,
        epochs=1,
        policy="exact",
        reading=flowdp.ReadingOptions(shuffle=False),
        devices=["cpu"] * devices,
        progress=False,
    ).fit()
    assert not model.kept
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_marks_on_parameters_are_copied() -> None:
    model = nn.Linear(2, 2)
    model.weight.options = {"lr": 0.0}  # type: ignore[attr-defined]
    made: Any = copy_module(model, CPU)
    assert made.weight.options == {"lr": 0.0}
    assert made.weight.options is not model.weight.options  # type: ignore[attr-defined]


def test_gradients_are_not_copied() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in copy_module(model, CPU).parameters())
    assert model.weight.grad is not None


def test_why_a_module_cannot_be_copied() -> None:
    model: Any = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(CopyError, match="cannot pickle"):
        copy_module(model, CPU)
    del model.lock
    model.found = [model(torch.ones(1, 2))]
    with pytest.raises(CopyError, match="its attribute 'found' holds a tensor with a graph: detach it"):
        copy_module(model, CPU)
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)


def test_a_factory_leaves_the_generator_of_its_accelerator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.xpu, "default_generators", (generator,))
    before = generator.get_state()
    lane = CudaLane(torch.device("cpu"), FakeXpu())
    lane.device = torch.device("xpu", 0)

    def build(device: torch.device) -> nn.Module:
        torch.rand(3, generator=generator)
        return nn.Identity()

    make_replica(nn.Identity(), build, lane)
    assert torch.equal(generator.get_state(), before)
