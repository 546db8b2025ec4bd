"""Tests of a stand-in module: it shows the original's parts under their own names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flowdp.modules.stand_in import StandInModule
from tests.loops import mlp


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_names_and_objects_are_the_modules_own() -> None:
    module = normed()
    stand_in = StandInModule(module)
    assert dict(stand_in.named_parameters()) == dict(module.named_parameters())
    assert dict(stand_in.named_buffers()) == dict(module.named_buffers())
    assert list(stand_in.children()) == list(module.children())
    assert stand_in.module is module
    assert stand_in.get_submodule("0") is module.get_submodule("0")


def test_modes_reach_the_module() -> None:
    module = normed()
    stand_in = StandInModule(module)
    assert stand_in.eval() is stand_in
    assert not stand_in.training
    assert not any(part.training for part in module.modules())
    stand_in.train()
    assert stand_in.training
    assert all(part.training for part in module.modules())
    assert not StandInModule(normed().eval()).training


def test_saved_under_the_modules_keys_and_loaded_from_them() -> None:
    module, other = mlp(), normed()
    assert list(StandInModule(module).state_dict()) == list(module.state_dict())
    state = {key: value + 1 for key, value in other.state_dict().items()}
    assert not any(StandInModule(other).load_state_dict(state))
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())


class Counting(nn.Module):
    """Saves a number that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_what_a_module_saves_on_its_own_account() -> None:
    module = Counting()
    larger = nn.Sequential(StandInModule(module))
    assert larger.state_dict() == {"0._extra_state": 3}
    larger.load_state_dict({"0._extra_state": 5})
    assert module.count == 5


def test_the_mode_is_the_modules_own() -> None:
    module = nn.Sequential(nn.Dropout()).eval()
    stand_in = StandInModule(module)
    assert not module.training
    assert not stand_in.training
    module.train()
    assert stand_in.training
    nn.Sequential(stand_in).eval()
    assert not module[0].training


# ---------------------------------------------------------------- attributes
class Model(nn.Module):
    kind = "a model"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.temperature = 1.0
        self.act = torch.tanh

    @property
    def width(self) -> int:
        return self.inner.in_features

    def decode(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    @staticmethod
    def helper() -> str:
        return "static"


class Sealed(StandInModule):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.own = 1
        self._seal()


def test_attributes_are_the_modules() -> None:
    stand_in = Sealed(Model())
    assert (stand_in.kind, stand_in.temperature) == ("a model", 1.0)
    assert (stand_in.width, stand_in.helper()) == (2, "static")
    assert stand_in.act is torch.tanh
    assert stand_in.inner is stand_in.module.inner
    assert not hasattr(stand_in, "no_such_name")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'no_such_name'"):
        _ = stand_in.no_such_name


def test_what_is_set_is_set_on_the_module() -> None:
    stand_in = Sealed(Model())
    stand_in.temperature = 2.0
    stand_in.new = 3
    stand_in.own = 4
    stand_in.inner = nn.Linear(2, 2, bias=False)
    assert (stand_in.module.temperature, stand_in.module.new, stand_in.new) == (2.0, 3, 3)
    assert "own" not in stand_in.module.__dict__
    assert stand_in.own == 4
    assert stand_in.module.inner.bias is None
    stand_in.training = False
    assert not stand_in.module.training


def test_a_method_runs_the_module() -> None:
    stand_in = Sealed(Model())
    assert stand_in.decode(torch.ones(1, 2)).shape == (1, 2)
    assert len(list(stand_in.parameters())) == 2, "those of nn.Module work"


def test_a_copy_that_is_being_made_has_no_module_yet() -> None:
    bare = StandInModule.__new__(StandInModule)
    assert not hasattr(bare, "anything")
    assert not hasattr(Sealed(Model()), "__deepcopy__")
    twin = copy.deepcopy(Sealed(Model()))
    twin.temperature = 5.0
    assert twin.module.temperature == 5.0
    assert twin.inner is twin.module.inner
