"""A module that stands for another one shows that one's parts under their own names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flowdp.modules.stand_in import AliasModule
from tests.loops import mlp


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_names_and_objects_are_the_modules_own() -> None:
    module = normed()
    alias = AliasModule(module)
    assert dict(alias.named_parameters()) == dict(module.named_parameters())
    assert dict(alias.named_buffers()) == dict(module.named_buffers())
    assert list(alias.children()) == list(module.children())
    assert alias.module is module
    assert alias.get_submodule("0") is module.get_submodule("0")


def test_parts_that_come_later_are_shared() -> None:
    module = normed()
    alias = AliasModule(module)
    module.register_parameter("late", nn.Parameter(torch.ones(1)))
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    assert alias.get_parameter("late") is module.get_parameter("late")
    assert "hidden" in dict(alias.named_buffers())
    assert "hidden" not in alias.state_dict()


def test_modes_reach_the_module() -> None:
    module = normed()
    alias = AliasModule(module)
    assert alias.eval() is alias
    assert not alias.training
    assert not any(part.training for part in module.modules())
    alias.train()
    assert alias.training
    assert all(part.training for part in module.modules())
    assert not AliasModule(normed().eval()).training


def test_saved_under_the_modules_keys_and_loaded_from_them() -> None:
    module, other = mlp(), normed()
    assert list(AliasModule(module).state_dict()) == list(module.state_dict())
    state = {key: value + 1 for key, value in other.state_dict().items()}
    assert not any(AliasModule(other).load_state_dict(state))
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())


def test_as_a_part_of_a_larger_module() -> None:
    module = normed()
    larger = nn.ModuleDict({"body": AliasModule(module), "head": nn.Linear(3, 1)})
    plain = nn.ModuleDict({"body": module, "head": nn.Linear(3, 1)})
    assert list(larger.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in larger.named_parameters()] == [name for name, _ in plain.named_parameters()]
    state = {key: value + 1 for key, value in larger.state_dict().items()}
    assert not any(larger.load_state_dict(state))
    assert all(torch.equal(value, state[key]) for key, value in larger.state_dict().items())
    assert torch.equal(module[0].weight, state["body.0.weight"])  # type: ignore[index]


class Counting(nn.Module):
    """Saves a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_what_a_module_saves_on_its_own_account() -> None:
    module = Counting()
    larger = nn.Sequential(AliasModule(module))
    assert larger.state_dict() == {"0._extra_state": 3}
    larger.load_state_dict({"0._extra_state": 5})
    assert module.count == 5


def test_the_mode_is_the_modules_own() -> None:
    module = nn.Sequential(nn.Dropout()).eval()
    alias = AliasModule(module)
    assert not module.training
    assert not alias.training
    module.train()
    assert alias.training
    nn.Sequential(alias).eval()
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


class Sealed(AliasModule):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.own = 1
        self._seal(type(self))


def test_attributes_are_the_modules() -> None:
    alias = Sealed(Model())
    assert (alias.kind, alias.temperature, alias.width, alias.helper()) == ("a model", 1.0, 2, "static")
    assert alias.act is torch.tanh
    assert alias.inner is alias.module.inner
    assert not hasattr(alias, "no_such_name")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'no_such_name'"):
        _ = alias.no_such_name


def test_what_is_set_is_set_on_the_module() -> None:
    alias = Sealed(Model())
    alias.temperature = 2.0
    alias.new = 3
    alias.own = 4
    alias.inner = nn.Linear(2, 2, bias=False)
    assert (alias.module.temperature, alias.module.new, alias.new) == (2.0, 3, 3)
    assert "own" not in alias.module.__dict__
    assert alias.own == 4
    assert alias.module.inner.bias is None
    alias.training = False
    assert not alias.module.training


def test_a_method_says_how_it_is_called() -> None:
    alias = Sealed(Model())
    with pytest.raises(AttributeError, match=r"'decode' is a method of Model.*`\.module\.decode\(\.\.\.\)`"):
        alias.decode(torch.ones(1, 2))
    assert not hasattr(alias, "decode")
    assert len(list(alias.parameters())) == 2, "those of nn.Module work"


def test_a_copy_that_is_being_made_has_no_module_yet() -> None:
    bare = AliasModule.__new__(AliasModule)
    assert not hasattr(bare, "anything")
    assert not hasattr(Sealed(Model()), "__deepcopy__")
    twin = copy.deepcopy(Sealed(Model()))
    twin.temperature = 5.0
    assert twin.module.temperature == 5.0
    assert twin.inner is twin.module.inner
