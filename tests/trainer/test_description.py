"""Tests of `print(trainer)`, whose lines agree with the run that follows, and of a run's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import flowdp

DATA = torch.arange(130.0).reshape(65, 2)


def trainer(**options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "policy": "cadence",
        "model": nn.Linear(2, 1),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-4),
        "loss": lambda model, batch: model(batch[0] if isinstance(batch, list) else batch).mean(),
        "dataset": DATA,
        "per_device_batch_size": 4,
        "epochs": 3,
        "devices": ["cpu", "cpu"],
        "progress": False,
    }
    return flowdp.Trainer(**given | options)


def parts(made: flowdp.Trainer) -> dict[str, str]:
    """The lines of a description by their labels."""
    return {line[2:17].strip(): line[17:] for line in str(made).splitlines()[1:]}


def test_it_is_aligned_text_and_repr_stays_one_line() -> None:
    made = trainer()
    assert str(made).startswith("Trainer of Linear, 3 parameters\n")
    assert list(parts(made))[:7] == [
        *("rank 0", "rank 1", "policy", "backend", "batch size", "steps", "precision")
    ]
    assert parts(made)["steps"].startswith("51 ")
    assert repr(made) == "<Trainer of Linear on cpu, cpu, policy='cadence'>"
    assert "backend" not in parts(trainer(devices=["cpu"]))


def test_options_that_were_chosen_are_told_without_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    made = parts(
        trainer(
            checkpoint=flowdp.CheckpointOptions(folder, every=2),
            resume=True,
            evaluation=flowdp.EvaluationOptions(DATA, every=5),
            outer=flowdp.OuterOptions(momentum=0.8),
            callbacks=[flowdp.EarlyStopping(patience=2)],
        )
    )
    assert made["checkpoint"] == f"dir={folder}, every=2"
    assert "every=5" in made["evaluation"]
    assert (made["outer"], made["resume"], made["callbacks"]) == ("momentum=0.8", "True", "EarlyStopping")
    assert not list(tmp_path.iterdir())


def test_what_is_not_known_and_what_will_fail_is_said() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            raise AssertionError("a sample was read")

    assert (
        parts(trainer(dataset=Stream()))["steps"] == "not known before the end; an unknown number in an epoch"
    )
    short = trainer(dataset=DATA[:3], reading=flowdp.ReadingOptions(drop_last=True))
    assert parts(short)["steps"].startswith(
        "not known, and start() will fail: drop_last=True leaves no batch"
    )
    assert str(trainer(model=lambda: nn.Linear(2, 1))).startswith("Trainer of a model of ")


# ---------------------------------------------------------------- plain values
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
