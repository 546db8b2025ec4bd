"""Tests of the start of a run: folder, resumed state, barrier tasks, checks."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from flowdp import Callback, EarlyStopping, OnCheckpoint, ReadingOptions, Trainer
from flowdp.engine.resume import Resumed
from flowdp.errors import CheckpointError, OptionError
from flowdp.options import CheckpointOptions
from flowdp.policy.interval import Interval
from flowdp.trainer.config import RunConfig
from flowdp.trainer.result import TrainedState
from flowdp.trainer.start import barrier_plan, check_run, find_start, open_folder


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


def trained(model: torch.nn.Module) -> TrainedState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainedState(model.state_dict(), optimizer.state_dict(), (), 0, 0, interrupted=True)


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
    assert barrier_plan(config(checkpoint=tmp_path), None).save == Interval(1, "epoch")
    options = CheckpointOptions(tmp_path, every=50, unit="step")
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


def test_a_state_begins_at_its_epoch() -> None:
    model = torch.nn.Linear(2, 1)
    folder, resumed = begun(config(resume=trained(model)))
    assert folder is None
    assert isinstance(resumed, Resumed)
    assert (resumed.position.done, resumed.position.global_step) == (0, 0)
    assert resumed.model.keys() == model.state_dict().keys()


@pytest.mark.parametrize("resume", [False, "a state"])
def test_the_checkpoints_of_another_run_are_not_written_over(tmp_path: Path, resume: Any) -> None:
    (tmp_path / "step-000000000007-1.pt").write_bytes(b"of days")
    state = trained(torch.nn.Linear(2, 1)) if resume else False
    with pytest.raises(OptionError, match="holds checkpoints of another run"):
        begun(config(checkpoint=tmp_path, resume=state))


def test_a_run_begins_anew_where_there_is_no_checkpoint_and_not_where_none_can_be_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "step-000000000007-1.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        begun(config(checkpoint=tmp_path, resume=True))
    folder, resumed = begun(config(checkpoint=tmp_path / "new", resume=True))
    assert folder is not None
    assert resumed is None


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
    assert check_run(own) == 4
    assert data.asked >= 1
    assert held_out.asked >= 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dataset": Counted(0)}, "the dataset is empty"),
        ({"evaluation": Counted(0)}, "evaluation: the dataset is empty"),
        ({"reading": ReadingOptions(num_workers=2)}, "num_workers=2 have no use for it"),
    ],
)
def test_a_wrong_dataset_is_named_before_a_thread_starts(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    given: dict[str, Any] = {
        "policy": "cadence",
        "dataset": torch.ones(8, 2),
        "per_device_batch_size": 2,
        "epochs": 1,
        "devices": 1,
    } | options
    made: list[str] = []

    def model() -> torch.nn.Module:
        made.append("model")
        return torch.nn.Linear(2, 1)

    trainer = Trainer(
        model,
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda m, b: m(b).mean(),
        progress=False,
        **given,
    )
    for refused in (trainer.check, trainer.start):
        with pytest.raises(OptionError, match=match):
            refused()
    assert started == made == []


def test_a_check_finds_checkpoints_that_could_not_be_resumed(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.ones(8, 2))

    own = config(dataset=Stream(), checkpoint=CheckpointOptions(tmp_path, every=5, unit="step"))
    with pytest.raises(OptionError, match="inside an epoch of an IterableDataset"):
        check_run(own)
