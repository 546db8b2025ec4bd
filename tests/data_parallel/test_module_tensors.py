"""Tests of changed modules: refused before the replicas compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from flowdp.data_parallel.module_tensors import ModuleTensors
from flowdp.errors import FlowdpError, OptionError
from tests.loops import CPU, mlp


class Tied(nn.Module):
    """A tied parameter, one that is None, and all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.register_buffer("state", torch.zeros(2))
        self.register_buffer("twin", self.state)
        self.register_buffer("cache", None)


def test_each_tensor_stands_once_parameters_first() -> None:
    module = Tied()
    tables = ModuleTensors(module)
    assert [id(t) for t in tables.parameters] == [id(module.first.weight), id(module.last.bias)]
    assert [id(t) for t in tables.tensors] == [id(t) for t in (*module.parameters(), module.state)]


REBUILT: dict[str, tuple[Callable[[Any], object], str]] = {
    "another part": (lambda m: setattr(m, "last", nn.Linear(2, 2)), "parts of Tied"),
    "a further part": (lambda m: m.add_module("more", nn.Linear(2, 2)), "parts of Tied"),
    "a new parameter": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(2))),
        "parts of Tied",
    ),
    "a part of a part": (lambda m: parametrizations.weight_norm(m.last), "parts of"),
    "no parameter": (lambda m: setattr(m.last, "bias", None), "a parameter that is None"),
    "one that was None": (lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(2))), "or was"),
    "untied": (lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(2, 2))), "that were tied"),
    "tied": (lambda m: setattr(m.first, "weight", m.last.bias), "tied"),
    "no buffer": (lambda m: setattr(m, "state", None), "no buffer 'state'"),
}


@pytest.mark.parametrize("how", REBUILT)
def test_another_structure_is_refused(how: str) -> None:
    rebuild, message = REBUILT[how]
    module = Tied()
    tables = ModuleTensors(module)
    tables.check_as_it_was()
    rebuild(module)
    with pytest.raises(FlowdpError, match=f"changed since setup.*{message}.*call setup"):
        tables.check_as_it_was()


def test_parameters_that_are_tied_afterwards_are_refused() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tables = ModuleTensors(module)
    module[1].weight = module[0].weight
    with pytest.raises(FlowdpError, match="tied now"):
        tables.check_as_it_was()


def test_values_and_what_a_forward_does_to_buffers_may_change() -> None:
    module = Tied()
    tables = ModuleTensors(module)
    module.cache, module.twin = torch.ones(3), torch.ones(2)
    module.state = module.cache
    module.last.bias = nn.Parameter(torch.ones(2))
    module.first.weight.requires_grad_(False)
    tables.check_as_it_was()
    assert tables.buffers[0] is module.cache


def test_a_buffer_that_has_grown_is_made_anew_and_a_parameter_is_not() -> None:
    module: Any = Tied()
    tables = ModuleTensors(module)
    state = module.state
    assert tables.fit(2, torch.ones(2)) is state
    grown = tables.fit(2, torch.ones(5, dtype=torch.float64))
    assert module.state is grown
    assert (grown.shape, grown.dtype) == ((5,), torch.float64)
    with pytest.raises(FlowdpError, match=r"'first.weight' is float16 \(2, 2\) now"):
        tables.fit(0, torch.ones(2, 2, dtype=torch.float16))


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(OptionError, match=r"'0.weight' has no shape yet: call the model once"):
        ModuleTensors(nn.Sequential(nn.LazyLinear(3)))


def test_a_replica_keeps_the_same() -> None:
    ModuleTensors(mlp()).check_like(ModuleTensors(mlp()), CPU)
    with pytest.raises(OptionError, match="has 5 modules and the model has 4"):
        ModuleTensors(mlp().append(nn.ReLU())).check_like(ModuleTensors(mlp()), CPU)
    with pytest.raises(OptionError, match=r"'0.weight' is float32"):
        ModuleTensors(mlp().float()).check_like(ModuleTensors(mlp()), CPU)
