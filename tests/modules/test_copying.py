from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.device.streams import StreamLane
from flowdp.modules.copying import CopyError, copy_module, make_replica
from tests.accelerators import FakeXpu

CPU = torch.device("cpu")


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
    lane = StreamLane(torch.device("cpu"), FakeXpu())
    lane.device = torch.device("xpu", 0)

    def build(device: torch.device) -> nn.Module:
        torch.rand(3, generator=generator)
        return nn.Identity()

    make_replica(nn.Identity(), build, lane)
    assert torch.equal(generator.get_state(), before)
