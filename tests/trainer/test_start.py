"""Tests of the start of a run: folder, resumed state, barrier tasks, checks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from flowdp import Callback, EarlyStopping, OnCheckpoint, Trainer
from flowdp.options import CheckpointOptions
from flowdp.policy.interval import Interval
from flowdp.trainer.config import RunConfig
from flowdp.trainer.resume import Resumed
from flowdp.trainer.start import barrier_plan, find_start, open_folder


def config(**options: Any) -> RunConfig:
    given: dict[str, Any] = {
        "policy": "cadence",
        "dataset": torch.ones(8, 2),
        "per_device_batch_size": 2,
        "epochs": 1,
        "devices": 1,
    } | options
    return Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        progress=False,
        **given,
    ).config


def begun(own: RunConfig) -> tuple[Any, Resumed | None]:
    with ExitStack() as undo:
        folder = open_folder(own, undo)
        return folder, find_start(own, folder)


def test_a_run_without_checkpoints_or_evaluation_has_no_tasks(tmp_path: Path) -> None:
    own = config()
    plan = barrier_plan(own, None)
    assert (plan.save, plan.evaluation) == (None, None)
    assert not any(plan.halts(epoch) for epoch in range(5))
    assert begun(own) == (None, None)
    assert not own.has_checkpoint_listeners
    assert list(tmp_path.iterdir()) == []


def test_a_folder_means_a_checkpoint_after_every_epoch(tmp_path: Path) -> None:
    assert barrier_plan(config(checkpoint=tmp_path), None).save == Interval(1, "epoch", 10.0)
    # Where no run can go on inside an epoch, none is written there.
    assert barrier_plan(config(checkpoint=tmp_path), None, inside=False).save == Interval(1, "epoch")
    options = CheckpointOptions(tmp_path, every=50, unit="step", max_minutes=None)
    assert barrier_plan(config(checkpoint=options), None).save == Interval(50, "step")


def test_a_listener_has_checkpoints_taken() -> None:
    class Deaf(Callback):
        pass

    class Hearing(Callback):
        def on_checkpoint(self, checkpoint: Any) -> None:
            pass

    assert barrier_plan(config(callbacks=[Deaf()]), None).save is None
    for listener in (Hearing(), OnCheckpoint(print)):
        own = config(callbacks=[listener])
        assert barrier_plan(own, None).save == Interval(1, "epoch")
        assert own.has_checkpoint_listeners


def test_early_stopping_becomes_the_monitor() -> None:
    stopping = EarlyStopping("acc", patience=2, mode="max", restore_best=True)
    own = config(callbacks=[stopping])
    plan = barrier_plan(own, None)
    assert plan.monitor is not None
    assert (plan.monitor.name, plan.monitor.patience, plan.keeps_best) == ("acc", 2, True)
    assert own.watched == ["acc", "max"]


class Counted(Dataset[Any]):
    """A dataset that records each call of its length."""

    def __init__(self, samples: int) -> None:
        self.samples, self.asked = samples, 0

    def __len__(self) -> int:
        self.asked += 1
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2)


def test_a_dataset_is_opened_by_a_check_and_not_before() -> None:
    data, held_out = Counted(8), Counted(4)
    own = config(dataset=data, evaluation=held_out)
    assert data.asked == held_out.asked == 0
    assert own.check() == 4
    assert data.asked >= 1
    assert held_out.asked >= 1
