"""Tests of the arguments of `setup`: checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from flowdp.data_parallel import arguments
from flowdp.data_parallel.arguments import (
    check_cadence,
    check_loss,
    check_model,
    check_optimizers,
    set_epoch,
)
from flowdp.errors import OptionError
from flowdp.options import CadenceOptions
from tests.loops import CPU, mlp


def test_a_model_is_a_module() -> None:
    check_model(mlp())
    with pytest.raises(OptionError, match=r"must be a torch\.nn\.Module, not <function mlp"):
        check_model(mlp)


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(4), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_parameters_and_buffers_without_a_shape(layer: Any) -> None:
    model = nn.Sequential(layer(), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(OptionError, match=r"'0\.\w+' has no shape yet; run one batch"):
        check_model(model)
    model(torch.ones(3, 4))
    check_model(model)


def test_a_loss_is_callable() -> None:
    assert check_loss(None) is None
    assert check_loss(max) is max
    with pytest.raises(OptionError, match=r"loss_fn .* not 3"):
        check_loss(3)


@pytest.mark.parametrize(
    ("option", "devices", "windows"),
    [
        (None, 2, False),  # two of the same name
        (True, 2, True),
        (False, 2, False),
        (CadenceOptions(anchor=3), 2, True),
        (CadenceOptions(max_anchor=0), 2, False),
        (CadenceOptions(max_batch_diff=0), 2, False),
        (True, 1, False),
        (CadenceOptions(), 1, False),
    ],
)
def test_when_there_are_windows(option: Any, devices: int, windows: bool) -> None:
    found = check_cadence(option, [CPU] * devices)
    assert found[1] is windows
    assert found[0] == (option if isinstance(option, CadenceOptions) else CadenceOptions())


def test_devices_of_different_names_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        def __init__(self, index: int, name: str) -> None:
            self.device, self.name = torch.device("cuda", index), name

    class Found:
        devices = (Info(0, "big"), Info(1, "big"), Info(2, "small"))

    monkeypatch.setattr(arguments, "find_devices", lambda probe: Found)
    cards = [info.device for info in Found.devices]
    assert check_cadence(None, cards)[1]
    assert not check_cadence(None, cards[:2])[1]
    assert check_cadence(None, [CPU, cards[0]])[1]
    assert not check_cadence(False, cards)[1]


def test_a_cadence_that_is_none() -> None:
    with pytest.raises(OptionError, match="cadence must be"):
        check_cadence("fast", [CPU] * 2)
    with pytest.raises(OptionError, match="rank 2 of 2 devices"):
        check_cadence(CadenceOptions(speed_hint=(2, 2.0)), [CPU] * 2)


def test_optimizers_one_several_or_made() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    one, other = SGD(model.parameters(), 0.1), SGD(model[2].parameters(), 0.1)
    assert check_optimizers(one, model) == (one,)
    assert check_optimizers([one, other], model) == (one, other)
    (made,) = check_optimizers(lambda parameters: SGD(parameters, 0.1), model)
    assert made.param_groups[0]["params"] == list(model[2].parameters())
    assert len(check_optimizers(lambda parameters: [SGD(parameters, 0.1), SGD(parameters, 0.2)], model)) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (3, "must be a torch optimizer"),
        ([3], "must be a torch optimizer"),
        (lambda parameters: None, "must be a torch optimizer"),
    ],
)
def test_optimizers_that_are_none(option: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_optimizers(option, mlp())


class Sampler:
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_whoever_wants_the_epoch_is_told() -> None:
    class Loader(Sampler):
        sampler = Sampler()
        batch_sampler = Sampler()

    loader = Loader()
    set_epoch(loader, 4)
    assert (loader.epoch, loader.sampler.epoch, loader.batch_sampler.epoch) == (4, 4, 4)
    set_epoch([1, 2], 4)
