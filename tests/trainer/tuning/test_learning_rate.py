"""Tests of the learning rate range test, against plain loops."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import LrCurve, find_lr
from tests.trainer.tuning.small import DATA, LR, loss, net, sgd, trainer

EVEN = tuple(part[:64] for part in DATA)


def start() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Linear(5, 1)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def plain_losses(batch_size: int, lrs: list[float]) -> list[float]:
    """Losses of a loop on one device."""
    model = start()
    optimizer = plain_sgd(model.parameters())
    batches = list(zip(*(part.split(batch_size) for part in EVEN), strict=True))
    losses = []
    for index, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        x, y = batches[index % len(batches)]
        value = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@pytest.mark.parametrize(("devices", "policy"), [(1, "cadence"), (2, "sync"), (2, "async"), (2, "exact")])
def test_the_losses_are_those_of_a_plain_loop(devices: int, policy: str) -> None:
    given = trainer(
        model=start(),
        optimizer=plain_sgd,
        dataset=EVEN,
        devices=["cpu"] * devices,
        policy=policy,
        # The schedule is replaced; the scaling is not, for it multiplies what is suggested.
        scheduler=flowdp.SchedulerOptions(lr_lambda=lambda step: 0.0, lr_scaling="sqrt", warmup_steps=50),
        reading=flowdp.ReadingOptions(shuffle=False),
    )
    curve = find_lr(given, lowest=1e-3, highest=0.1, steps=21)
    assert curve.lrs == pytest.approx([1e-3 * 100 ** (index / 20) for index in range(21)])
    assert not curve.diverged
    scaled = [devices**0.5 * lr for lr in curve.lrs]
    assert curve.losses == pytest.approx(plain_losses(4 * devices, scaled), rel=1e-4)


def test_the_suggestion_lowers_the_loss_and_the_test_ends_where_it_diverges() -> None:
    curve = find_lr(trainer(model=start(), optimizer=plain_sgd, dataset=EVEN, devices=["cpu"] * 2))
    assert curve.diverged
    assert 1e-3 < (curve.suggestion or 0.0) < curve.lrs[-1] < 10.0
    assert "the loss diverged" in str(curve)
    assert f"suggested learning rate {curve.suggestion:.1e}" in str(curve)


def test_model_and_optimizer_are_left_alone() -> None:
    model = net()
    optimizer = sgd(model.parameters())
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    find_lr(trainer(model=model, optimizer=optimizer), steps=20)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == LR
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": nn.MSELoss()},
        {"loss": lambda model, batch: (loss(model, batch), {"other": 1.0})},
        {"loss": lambda model, batch: {"loss": loss(model, batch)}},
        {"gradient_accumulation_steps": 3},
        {"per_device_batch_size": [4, 8], "devices": ["cpu"] * 2},
        {"precision": "bf16", "max_grad_norm": 1.0},
        {
            "runtime": flowdp.RuntimeOptions(partition_ratios=[1, 2]),
            "devices": ["cpu"] * 2,
            "policy": "exact",
        },
    ],
)
def test_each_kind_of_trainer_has_a_curve(options: dict[str, Any]) -> None:
    curve = find_lr(trainer(**options), lowest=1e-4, highest=1e-2, steps=12)
    assert len(curve.lrs) == len(curve.losses) == len(curve.smoothed) == 12


def step(worker: Any, batch: Any) -> dict[str, Tensor]:
    value = loss(worker.model, batch)
    worker.backward(value)
    for optimizer in worker.optimizers:
        worker.step(optimizer)
    return {"loss": value}


def test_a_step_of_ones_own_with_two_optimizers_keeps_their_ratio() -> None:
    seen = []

    def watched(worker: Any, batch: Any) -> dict[str, Tensor]:
        seen.append([one.param_groups[0]["lr"] for one in worker.optimizers])
        return step(worker, batch)

    def two(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[3].parameters(), 0.2)]

    curve = find_lr(trainer(train_step=watched, optimizer=two), lowest=1e-3, highest=1e-2, steps=10)
    assert [first for first, _ in seen[:10]] == pytest.approx(curve.lrs)
    assert all(second == pytest.approx(2 * first) for first, second in seen)


def test_a_step_without_a_loss_and_a_rate_of_nothing() -> None:
    def silent(worker: Any, batch: Any) -> None:
        step(worker, batch)

    with pytest.raises(flowdp.OptionError, match=r'let train_step return \{"loss": loss'):
        find_lr(trainer(train_step=silent))
    with pytest.raises(flowdp.OptionError, match="lr=0 stays 0"):
        find_lr(trainer(optimizer=lambda params: torch.optim.SGD(params, lr=0.0)))


def test_a_first_loss_that_is_not_finite_is_no_curve() -> None:
    with pytest.raises(flowdp.FlowdpError, match="the first loss is not finite"):
        find_lr(trainer(loss=lambda model, batch: loss(model, batch) * float("nan")))


def test_without_a_descent_there_is_no_suggestion() -> None:
    curve = LrCurve(lrs=(1e-3, 1e-2, 1e-1), losses=(1.0, 1.0, 2.0), smoothed=(1.0, 1.0, 2.0), diverged=False)
    assert curve.suggestion is None
    assert str(curve).startswith("no suggestion: the loss fell nowhere | 3 steps from 1.0e-03 to 1.0e-01")
    assert LrCurve((0.1,), (1.0,), (1.0,), True).suggestion is None


def test_the_curve_is_drawn() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curve = LrCurve((1e-3, 1e-2, 1e-1), (2.0, 1.0, 50.0), (2.0, 1.5, 6.0), diverged=True)
    figure = curve.plot()
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[1] < 10
    assert [tuple(line.get_xdata()) for line in axes.lines[:2]] == [curve.lrs] * 2
    file = io.BytesIO()
    figure.savefig(file)
    assert file.getvalue()
