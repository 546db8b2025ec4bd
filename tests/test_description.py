"""Tests of `print(trainer)`: each line agrees with the run that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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


def parts(made: flowdp.Trainer) -> dict[str, list[str]]:
    """The lines of a description by their labels."""
    found: dict[str, list[str]] = {}
    for line in str(made).splitlines()[1:]:
        label, text = line[2:17].strip(), line[17:]
        assert line[:2] == "  "
        found.setdefault(label or list(found)[-1], []).append(text)
    return found


def test_it_is_aligned_text_and_repr_stays_one_line() -> None:
    made = trainer()
    assert str(made).startswith("Trainer of Linear, 3 parameters\n")
    assert list(parts(made)) == [
        *("devices", "policy", "backend", "batch size", "steps", "learning rate", "precision"),
        *("evaluation", "checkpoints", "resume", "process"),
    ]
    assert repr(made) == "<Trainer of Linear on cpu, cpu, policy='cadence'>"
    assert parts(made)["devices"] == [f"cpu {flowdp.devices(probe=False).devices[-1]}: ranks 0, 1"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "exact"},
        {"policy": "sync", "per_device_batch_size": [4, 8]},
        {"policy": "sync", "gradient_accumulation_steps": 3},
        {"max_steps": 7},
        {"policy": "cadence", "dataset": DataLoader(TensorDataset(DATA), 8), "per_device_batch_size": None},
        {"reading": flowdp.ReadingOptions(drop_last=True)},
        {"limit_batches": 5},
    ],
)
def test_the_steps_are_those_of_the_run(options: dict[str, Any]) -> None:
    made = trainer(**options)
    total = int(parts(made)["steps"][0].split(" ")[0])
    assert made.fit().global_step == total


def test_an_outer_step_has_a_line_of_its_own() -> None:
    assert "outer step" not in parts(trainer())
    nesterov = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    for given, devices, text in (
        ({}, 2, "momentum 0.5 on the difference between two means, rate 1"),
        (nesterov, 2, "Nesterov's momentum 0.9 on the difference between two means, rate 0.7"),
        ({}, 1, "none: one device takes no mean"),
        ({"momentum": 0}, 2, "none: the plain mean"),
    ):
        made = trainer(outer=flowdp.OuterOptions(**given), devices=["cpu"] * devices)  # type: ignore[arg-type]
        assert parts(made)["outer step"] == [text]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "sync"}, "sync: the mean of the parameters after one step of every device"),
        (
            {"cadence": flowdp.CadenceOptions(anchor=3, max_anchor=7)},
            "cadence: the mean of the parameters after 3 to 7 steps of the slowest device; shares by speed",
        ),
        (
            {"cadence": flowdp.CadenceOptions(max_batch_diff=0)},
            "cadence: the mean of the parameters after one step",
        ),
        ({"policy": "async"}, "async: devices train on while snapshots of their parameters are averaged"),
        ({"devices": ["cpu"]}, "cadence: one device, so no mean is taken"),
        (
            {"policy": "exact", "runtime": flowdp.RuntimeOptions(partition_ratios=[1, 3])},
            "exact: all devices take one step together on the mean of their gradients; shares 0.25 : 0.75",
        ),
    ],
)
def test_the_policy_is_that_which_is_really_held(options: dict[str, Any], text: str) -> None:
    assert parts(trainer(**options))["policy"][0].startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "8 in all; 4 on each device"),
        ({"per_device_batch_size": [4, 8]}, "12 in all; 4 | 8 on each device"),
        ({"gradient_accumulation_steps": 3}, "24 in all; 4 on each device, 12 in a step"),
        ({"policy": "exact", "batch_size": 30}, "30 in all; forwards of at most 4"),
        (
            {
                "policy": "cadence",
                "dataset": DataLoader(TensorDataset(DATA), 8),
                "per_device_batch_size": None,
            },
            "8 in all; 4 on each device",
        ),
        (
            {
                "policy": "cadence",
                "dataset": DataLoader(TensorDataset(DATA), None),
                "per_device_batch_size": None,
            },
            "as the DataLoader's batches are, each for one device",
        ),
    ],
)
def test_sizes(options: dict[str, Any], text: str) -> None:
    assert parts(trainer(**options))["batch size"] == [text]


def test_backends_with_their_reason() -> None:
    assert parts(trainer())["backend"] == ["local: all devices are this process's CPU"]
    given = trainer(runtime=flowdp.RuntimeOptions(backend="cpu", tune_process=False))
    assert parts(given)["backend"] == ["cpu: as given"]
    assert parts(given)["process"] == ["its settings are left alone"]
    tuned = trainer(runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)))
    assert parts(tuned)["process"] == ["freed memory kept (glibc); threads switch every 0.5 ms"]
    assert "backend" not in parts(trainer(devices=["cpu"]))


def test_rate_evaluation_and_precision() -> None:
    schedule = flowdp.SchedulerOptions(
        lambda optimizer: StepLR(optimizer, 3), unit="epoch", warmup_steps=1500, lr_scaling="sqrt"
    )
    made = parts(
        trainer(
            scheduler=schedule,
            evaluation=flowdp.EvaluationOptions(DATA, every=2),
            precision="bf16",
            max_grad_norm=0.5,
            callbacks=[flowdp.EarlyStopping(patience=2)],
        )
    )
    assert made["learning rate"] == [
        "by a scheduler, in epochs, times 1.414 for 2 devices, a warm-up of 1,500 steps"
    ]
    assert made["evaluation"] == ["after every 2 epochs on 65 samples"]
    assert made["precision"] == ["bf16 by autocast, gradients clipped to a norm of 0.5"]
    assert made["callbacks"] == ["EarlyStopping"]
    by_function = trainer(scheduler=flowdp.SchedulerOptions(lr_lambda=lambda step: 1.0))
    assert parts(by_function)["learning rate"] == ["by lr_lambda, in steps of all devices"]
    named = trainer(scheduler=flowdp.SchedulerOptions(decay, unit="step"))
    assert parts(named)["learning rate"] == ["by decay, in steps"]


def decay(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 3)


def test_checkpoints_and_resume_are_told_without_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save = flowdp.CheckpointOptions(folder, every=2, keep_best=("loss", "min"))
    made = parts(trainer(checkpoint=save, resume=True))
    assert made["checkpoints"] == [
        f"in {folder} after every 2 epochs, and at the end",
        "the newest 3 are kept, and the best by loss (min)",
    ]
    assert made["resume"] == [f"from the newest checkpoint in {folder}, if there is one"]
    assert not folder.exists()
    written = parts(trainer(timeline=tmp_path / "run.html"))
    assert written["timeline"] == [f"saved to {tmp_path / 'run.html'} at the end"]
    assert not list(tmp_path.iterdir())
    state = trainer(max_steps=2, epochs=None).fit()
    assert parts(trainer(resume=state))["resume"][0].startswith("from <TrainedState: 2 tensors")
    assert parts(trainer(resume="gone.pt"))["resume"] == ["from gone.pt"]


def test_what_is_not_known_and_what_will_fail_is_said() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            raise AssertionError("a sample was read")

    assert parts(trainer(dataset=Stream()))["steps"] == [
        "not known before the end: 3 epochs",
        "an unknown number in an epoch",
    ]
    mixed = parts(trainer(per_device_batch_size=[4, 8], policy="async"))["steps"]
    assert mixed == ["not known before the end: 3 epochs", "an unknown number in an epoch of 65 samples"]
    short = trainer(dataset=DATA[:3], reading=flowdp.ReadingOptions(drop_last=True))
    assert parts(short)["steps"][0].startswith(
        "not known, and start() will fail: drop_last=True leaves no batch"
    )
    assert str(trainer(model=lambda: nn.Linear(2, 1))).startswith("Trainer of a model of ")


def test_an_evaluation_by_steps_is_described_by_its_unit() -> None:
    own = flowdp.EvaluationOptions((torch.zeros(9, 4), torch.zeros(9, 1)), every=500, unit="step")
    assert "after every 500 steps" in str(trainer(evaluation=own))


def test_clipping_by_value_is_said() -> None:
    assert "gradients clipped to values of 0.25" in str(trainer(max_grad_value=0.25))
