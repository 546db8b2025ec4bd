"""Tests of the monitor of learning rates: every group of every optimizer, as it was at that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp

X = torch.arange(24.0).view(12, 2) / 24


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def groups(model: Two) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.01}]
    )


def named(model: Two) -> torch.optim.Optimizer:
    optimizer = groups(model)
    for group, name in zip(optimizer.param_groups, ("body", "head,"), strict=True):
        group["name"] = name
    return optimizer


def trainer(*callbacks: flowdp.Callback, **options: Any) -> flowdp.Trainer:
    given = {"loss": loss, "epochs": 2, "policy": "sync", "devices": ["cpu", "cpu"]}
    return flowdp.Trainer(
        Two(), dataset=(X,), per_device_batch_size=2, callbacks=callbacks, progress=False, **(given | options)
    )


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_every_group_of_an_optimizer(policy: str) -> None:
    monitor = flowdp.LearningRateMonitor(every="epoch")
    scheduler = flowdp.SchedulerOptions(halving, unit="epoch")
    run = trainer(monitor, optimizer=groups, policy=policy, scheduler=scheduler).start()
    run.join()
    assert {name: list(curve.values()) for name, curve in monitor.rates.items()} == {
        "lr": [0.1, 0.05],
        "0": [0.1, 0.05],
        "1": [0.01, 0.005],
    }
    assert list(monitor.rates["1"]) == [one.global_step for one in run.history]
    assert [one.group_lrs for one in run.history] == [{"0": 0.1, "1": 0.01}, {"0": 0.05, "1": 0.005}]


def test_groups_with_names_and_a_rate_that_was_set(tmp_path: Path) -> None:
    monitor, table = flowdp.LearningRateMonitor(), flowdp.CSVLogger(tmp_path / "m.csv")
    run = trainer(monitor, table, optimizer=named, epochs=None, max_steps=10**6).start()
    run.set_lr(0.2)
    while run.snapshot().history == ():
        pass
    run.stop()
    run.join()
    assert list(monitor.rates) == ["lr", "body", "head,"]
    assert list(monitor.rates["head,"].values())[-1] == pytest.approx(0.02)
    assert '"lr_groups/head,"' in (tmp_path / "m.csv").read_text()


def test_several_optimizers_and_one_of_each_group() -> None:
    def gan(model: Two) -> dict[str, torch.optim.Optimizer]:
        return {
            "g": torch.optim.SGD(model.a.parameters(), lr=0.3),
            "d": torch.optim.SGD(model.b.parameters(), lr=0.4),
        }

    def step(worker: Any, batch: Any) -> None:
        worker.backward(worker.model(batch[0]).square().mean())
        for optimizer in worker.optimizers.values():
            worker.step(optimizer)

    monitor = flowdp.LearningRateMonitor()
    trainer(monitor, optimizer=gan, loss=None, train_step=step).fit()
    assert {name: curve[12] for name, curve in monitor.rates.items()} == {"lr": 0.3, "g": 0.3, "d": 0.4}


def test_one_group_has_one_curve_that_a_resumed_run_continues(tmp_path: Path) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    monitor = flowdp.LearningRateMonitor(every="epoch")
    for epochs in (1, 3):
        state = trainer(monitor, optimizer=sgd, epochs=epochs, checkpoint=tmp_path, resume=True).fit()
    assert monitor.rates == {"lr": {6: 0.1, 12: 0.1, 18: 0.1}}
    assert state.history[0].group_lrs == {}
    trainer(monitor, optimizer=sgd, epochs=1).fit()
    assert monitor.rates == {"lr": {6: 0.1}}
