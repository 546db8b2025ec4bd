"""Tests of the modes of a module's parts: those that training sets, and those it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flowdp
from flowdp.modules.training_mode import put_modes, start_training

DATA = (torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(16, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


class Freezing(Net):
    """Freezes its BatchNorm, as is common."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self.body[1].eval()
        return self


def in_eval(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if not part.training]


def frozen(kind: type[Net] = Net) -> Net:
    model = kind()
    model.body[1].eval()
    model.body[2].eval()
    return model


def test_parts_in_eval_mode_stay_there() -> None:
    model = frozen()
    start_training(model)
    assert in_eval(model) == ["body.1", "body.2"]
    model.body.eval()
    model.body[0].train()
    start_training(model)
    assert in_eval(model) == ["body", "body.1", "body.2"]


def test_a_module_in_eval_mode_is_trained_with_all_its_parts() -> None:
    model = Net().eval()
    model.head.train()
    start_training(model)
    assert in_eval(model) == []


def test_a_train_that_freezes_is_called() -> None:
    for model in (Freezing(), Freezing().eval()):
        start_training(model)
        assert in_eval(model) == ["body.1"]
    model = frozen(Freezing)
    start_training(model)
    assert in_eval(model) == ["body.1", "body.2"]


def test_modes_are_put_back() -> None:
    model = frozen()
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    put_modes(modes)
    assert in_eval(model) == ["body.1", "body.2"]


@pytest.mark.parametrize(
    ("make", "kept", "policy", "devices"),
    [
        (frozen, ["body.1", "body.2"], "sync", 1),
        (frozen, ["body.1", "body.2"], "exact", 2),
        (Freezing, ["body.1"], "sync", 2),
    ],
)
def test_a_run_trains_and_evaluates_in_the_modes_it_was_given(
    make: Any, kept: list[str], policy: Any, devices: int
) -> None:
    seen: list[tuple[bool, list[str]]] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        seen.append((torch.is_grad_enabled(), in_eval(model)))
        return F.mse_loss(model(batch[0]), batch[1])

    everything = [name for name, _ in make().named_modules()]
    for model in (make(), make):
        state = flowdp.Trainer(
            model,
            lambda params: torch.optim.SGD(params, 0.1),
            loss,
            dataset=DATA,
            per_device_batch_size=4,
            epochs=2,
            evaluation=DATA,
            devices=["cpu"] * devices,
            policy=policy,
            failures=flowdp.FailureOptions(check_loss=False),
            progress=False,
        ).fit()
        assert state.state_dict["body.1.num_batches_tracked"] == 0
        assert not state.state_dict["body.1.running_mean"].any()
        if isinstance(model, nn.Module):
            assert in_eval(model) == in_eval(make())
    assert {tuple(names) for trains, names in seen if trains} == {tuple(kept)}
    assert {tuple(names) for trains, names in seen if not trains} == {tuple(everything)}


def test_a_resumed_run_has_the_modes_of_the_model(tmp_path: Any) -> None:
    def trainer(epochs: int, model: nn.Module) -> flowdp.Trainer:
        return flowdp.Trainer(
            model,
            lambda params: torch.optim.SGD(params, 0.1),
            lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            dataset=DATA,
            per_device_batch_size=4,
            epochs=epochs,
            devices=["cpu"] * 2,
            policy="sync",
            checkpoint=tmp_path / "kept",
            resume=True,
            progress=False,
        )

    trainer(1, frozen()).fit()
    again = frozen()
    resumed = trainer(2, again).fit()
    whole = flowdp.Trainer(
        frozen(),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        dataset=DATA,
        per_device_batch_size=4,
        epochs=2,
        devices=["cpu"] * 2,
        policy="sync",
        progress=False,
    ).fit()
    assert in_eval(again) == ["body.1", "body.2"]
    for name, value in whole.state_dict.items():
        assert torch.equal(value, resumed.state_dict[name]), name
