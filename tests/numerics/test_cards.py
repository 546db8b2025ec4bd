"""Exact steps of several cards, on fake streams: as one device takes them, for every optimizer of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flowdp
from tests.data.cards import Card, put_on_streams
from tests.numerics.test_exact import apart, check_equal
from tests.numerics.test_owners import OPTIMIZERS, STEPS, Make, X, Y, net, windows

UNEQUAL = (0.5, 0.4, 0.1)
FEW = ["SGD", "AdamW", "Adafactor"]


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fake streams alone, on which every replica is watched."""
    card = Card()
    put_on_streams(card, monkeypatch.setattr)
    yield "streams"
    assert not card.races


class Idle(nn.Sequential):
    """A model with a layer that has a part in some windows, and one in none."""

    def __init__(self) -> None:
        super().__init__(*net())
        self.often, self.never = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Any) -> Any:
        output = nn.Sequential(*list(self)[:5])(x)  # type: ignore[call-overload]
        return output + self.often(output) * (x[:, :1] > 1.0) if bool((x[:, 0] > 1.0).any()) else output


def idle_net() -> Idle:
    torch.manual_seed(4)
    return Idle()


def weighted(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    weight = x[:, 1].abs().sum()
    return {"loss": nn.functional.mse_loss(model(x), y, reduction="sum") / weight, "weight": weight}


def train(make: Make, model: nn.Module, loss: Any = weighted, **options: Any) -> flowdp.Run:
    tuning = flowdp.ProcessTuning(openmp=False)
    run = flowdp.Trainer(
        model, make, loss, dataset=(X, Y), batch_size=13, per_device_batch_size=4, max_steps=STEPS,
        devices=["cpu"] * 3, policy="exact", progress=False,
        runtime=flowdp.RuntimeOptions(partition_ratios=UNEQUAL, tune_process=tuning),
        failures=flowdp.FailureOptions(check_loss=False), **options,
    ).start()  # fmt: skip
    assert run.join().global_step == STEPS
    check_equal(run)
    return run


def plain(make: Make, model: nn.Module, clip: float | None = None, value: float | None = None) -> nn.Module:
    optimizer = make(model.parameters())
    for _, index in zip(range(STEPS), windows(), strict=False):
        weighted(model, (X[index], Y[index]))["loss"].backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if value is not None:
            nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    model, make = net(), OPTIMIZERS[name]
    train(make, model)
    assert apart(model, plain(make, net())) < 1e-12


@pytest.mark.parametrize("clip", [{"max_grad_norm": 0.3}, {"max_grad_value": 0.01}], ids=["norm", "value"])
@pytest.mark.parametrize("name", FEW)
def test_groups_clipping_and_parameters_without_a_gradient(name: str, clip: dict[str, float]) -> None:
    def make(params: Any) -> optim.Optimizer:
        listed = list(params)
        return OPTIMIZERS[name]([{"params": listed[::2], "lr": 0.003}, {"params": listed[1::2]}])

    model = idle_net()
    train(make, model, **clip)
    expected = plain(make, idle_net(), clip=clip.get("max_grad_norm"), value=clip.get("max_grad_value"))
    assert apart(model, expected) < 1e-12
    assert torch.equal(model.never.weight, idle_net().never.weight)


def test_a_rank_with_nans_is_left_out_of_its_window() -> None:
    """Its gradient is masked on the device; all take the step of the others."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        is_odd = worker.rank == 1 and worker.global_step == 5
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * (torch.nan if is_odd else 1.0)

    model = net()
    train(OPTIMIZERS["AdamW"], model, loss)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
