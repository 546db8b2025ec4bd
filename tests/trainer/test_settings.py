"""Tests of a run's settings: plain values by dotted names."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F

import flowdp

X = torch.zeros(8, 2)


def settings(optimizer: Any, **options: Any) -> dict[str, Any]:
    given = {
        "policy": "cadence",
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "per_device_batch_size": 2,
        "max_steps": 2,
        "dataset": (X, X[:, :1]),
    }
    run = flowdp.Trainer(
        torch.nn.Linear(2, 1),
        optimizer,
        devices=["cpu", "cpu"],
        progress=False,
        **(given | options),
    ).start()
    run.join()
    assert json.loads(json.dumps(run.settings)) == run.settings
    return dict(run.settings)


def test_arguments_and_records_of_options() -> None:
    found = settings(
        lambda params: torch.optim.AdamW(params, lr=0.1),
        seed=3,
        policy="cadence",
        cadence=flowdp.CadenceOptions(anchor=4),
        outer=flowdp.OuterOptions(momentum=0.25),
        scheduler=flowdp.SchedulerOptions(lr_lambda=lambda step: 1.0),
    )
    wanted = {
        "model": "Linear",
        "parameters": 3,
        "devices": "cpu, cpu",
        "world_size": 2,
        "policy": "cadence",
        "per_device_batch_size": 2,
        "seed": 3,
        "max_steps": 2,
        "epochs": None,
        "optimizer": "AdamW",
        "optimizer.lr": 0.1,
        "optimizer.betas": "(0.9, 0.999)",
        "cadence.anchor": 4,
        "outer.momentum": 0.25,
        "failures.on_nan": "quarantine",
        "scheduler.unit": None,
    }
    assert found.items() >= wanted.items()
    assert "lambda" in found["scheduler.lr_lambda"]
    assert "optimizer.params" not in found


def test_several_optimizers_and_groups() -> None:
    def optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
        return {"a": torch.optim.SGD(groups)}

    def step(worker: Any, batch: Any) -> None:
        worker.backward(worker.model(batch[0]).sum())
        worker.step(worker.optimizers["a"])

    found = settings(optimizers, loss=None, train_step=step)
    assert found["optimizer.a"] == "SGD"
    assert (found["optimizer.a.group0.lr"], found["optimizer.a.group1.lr"]) == (0.1, 0.5)
