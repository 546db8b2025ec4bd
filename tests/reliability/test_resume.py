"""Tests of resumed runs: every sample of every epoch once, with other devices, datasets or options."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import flowdp
from flowdp import CheckpointError, CheckpointOptions, DataError, OptionError, StepError
from flowdp.checkpoint.file import read
from flowdp.device.worker_context import CurrentWorker
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import (
    ENDLESS,
    SAMPLES,
    Counts,
    Door,
    Written,
    count,
    stop,
    stop_at,
    trainer,
)

POLICIES = ("sync", "cadence", "async", "exact")
ALL = Counter(range(SAMPLES))
MANY = 400


def check(
    recorder: StepRecorder, state: flowdp.TrainedState, epochs: int, expected: Counter[int] = ALL
) -> None:
    """Assert that both runs together have trained every sample once, and that the records agree."""
    assert not state.interrupted
    assert state.epochs_done == epochs
    assert [record.epoch for record in state.history] == list(range(epochs))
    for epoch in range(epochs):
        assert recorder.samples(epoch) == expected
    for record in state.history:
        assert sum(part.samples for part in record.per_rank) == expected.total()
    assert (state.state_dict["trained"] > 0).sum() == len(expected)


# ---------------------------------------------------------------- any number of devices
@pytest.mark.parametrize(
    ("devices", "step", "by"), [(1, 2, "folder"), (3, 2, "folder"), (1, 8, "state"), (3, 8, "state")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_cut_in_the_middle_of_an_epoch(
    tmp_path: Path, recorder: StepRecorder, policy: str, devices: int, step: int, by: str
) -> None:
    cut = stop_at(recorder, step, trainer(recorder, policy, 2, checkpoint=tmp_path))
    assert cut.interrupted
    assert by == "state" or 0 < len(recorder.samples(0)) < SAMPLES
    source = {"checkpoint": tmp_path, "resume": True} if by == "folder" else {"resume": cut}
    state = trainer(recorder, policy, devices, **source).fit()
    check(recorder, state, 3)
    assert state.global_step == (9 if policy == "exact" else 18)


@pytest.mark.parametrize("devices", [1, 3])
def test_batches_that_a_hurried_rank_left_are_not_forgotten(
    tmp_path: Path, recorder: StepRecorder, devices: int
) -> None:
    cadence = flowdp.CadenceOptions(anchor=3, max_anchor=3)
    options: dict[str, Any] = {"checkpoint": tmp_path, "samples": 90, "cadence": cadence}
    door, others = Door(), threading.Event()

    def hold(worker: CurrentWorker, _: int) -> None:
        if worker.rank == 1:
            door.wait()
        elif worker.local_step == 2:
            others.set()

    recorder.before = hold
    run = trainer(recorder, "cadence", 2, **options).start()
    assert door.reached.wait(HANG_S)
    assert others.wait(HANG_S)  # rank 0 has taken its part of the round, rank 1 is in its first step
    stop(run)
    door.opened.set()
    run.join(HANG_S)
    recorder.before = None
    [stood] = read(newest(tmp_path))["position"].open
    assert stood.missing == (3,)  # 5, the last one dealt, counts as not dealt
    state = trainer(recorder, "cadence", devices, resume=True, **options).fit()
    check(recorder, state, 3, Counter(range(90)))


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 2, 3, 1), strict=True)))
def test_more_epochs_than_before(tmp_path: Path, recorder: StepRecorder, policy: str, devices: int) -> None:
    first = trainer(recorder, policy, 2, checkpoint=tmp_path, epochs=1).fit()
    run = trainer(recorder, policy, devices, checkpoint=tmp_path, resume=True, epochs=3).start()
    # Its own epochs; those before are in the history.
    assert [record.epoch for record in run.metrics()] == [1, 2]
    state = run.join()
    assert [record.epoch for record in state.history] == [0, 1, 2]
    check(recorder, state, 3)
    assert state.history[0] == first.history[0]
    assert state.global_step == 3 * first.global_step


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 3, 2, 3), strict=True)))
def test_what_failed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, recorder: StepRecorder, policy: str, devices: int
) -> None:
    written = Written()

    def fails(model: nn.Module, batch: Any) -> Tensor:
        if len(recorder.steps) >= MANY // 8:  # half of them: a checkpoint was due, and may still be written
            written.wait(bool)
        if written.all:
            raise ValueError("mine")
        return count(model, batch)

    options: dict[str, Any] = {
        "epochs": 1,
        "samples": MANY,
        "checkpoint": CheckpointOptions(tmp_path, unit="step"),
    }
    with pytest.raises(StepError, match="mine"):
        trainer(recorder, policy, 2, loss=fails, callbacks=[flowdp.OnCheckpoint(written)], **options).fit()
    recorder.steps.clear()
    state = trainer(recorder, policy, devices, resume=True, **options).fit()
    # The first run cannot count a step lost with the failure; the model can.
    assert 0 < len(recorder.samples(0)) < MANY
    assert max(recorder.samples(0).values()) == 1
    assert (state.state_dict["trained"] > 0).all()
    assert sum(part.samples for part in state.history[0].per_rank) == MANY


# ---------------------------------------------------------------- any dataset


class Stream(IterableDataset[Any]):
    """Samples in their own order, with set_epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[int]]:
        yield from ((index,) for index in range(SAMPLES))


@pytest.mark.parametrize("by", ["folder", "state"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_is_read_again_up_to_where_it_was_cut(
    tmp_path: Path, recorder: StepRecorder, policy: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut = stop_at(recorder, 2, trainer(recorder, policy, 2, dataset=Stream(), checkpoint=tmp_path))
    assert cut.interrupted
    source = {"checkpoint": tmp_path, "resume": True} if by == "folder" else {"resume": cut}
    with caplog.at_level("INFO", "flowdp"):
        state = trainer(recorder, policy, 2, dataset=Stream(), **source).fit()
    check(recorder, state, 3)
    assert "epoch 1: read again up to batch" in caplog.text


class Reshuffled(Stream):
    """Another order each time."""

    def __iter__(self) -> Iterator[tuple[int]]:
        yield from ((int(index),) for index in torch.randperm(SAMPLES))


@pytest.mark.parametrize("policy", ["exact", "async"])
def test_a_stream_that_differs_is_an_error_before_anything_is_trained(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    stop_at(recorder, 2, trainer(recorder, policy, 2, dataset=Reshuffled(), checkpoint=tmp_path))
    trained = len(recorder.steps)
    with pytest.raises(DataError, match="has not yielded the same"):
        trainer(recorder, policy, 2, dataset=Reshuffled(), checkpoint=tmp_path, resume=True).fit()
    assert len(recorder.steps) == trained


def test_a_stream_that_has_become_shorter_is_an_error(tmp_path: Path, recorder: StepRecorder) -> None:
    class Short(Stream):
        def __iter__(self) -> Iterator[tuple[int]]:
            return itertools.islice(super().__iter__(), 1)

    stop_at(recorder, 2, trainer(recorder, "exact", 2, dataset=Stream(), checkpoint=tmp_path))
    with pytest.raises(DataError, match="has not yielded the same"):
        trainer(recorder, "exact", 2, dataset=Short(), checkpoint=tmp_path, resume=True).fit()


# ---------------------------------------------------------------- the source of the state
def newest(folder: Path) -> Path:
    return max(folder.glob("step-*.pt"))


def test_from_a_file_or_a_folder_into_another_folder(tmp_path: Path, recorder: StepRecorder) -> None:
    old = tmp_path / "old"
    trainer(recorder, "sync", 2, checkpoint=old, epochs=1).fit()
    files = sorted(old.iterdir())
    first = list(recorder.steps)
    for number, place in enumerate((old, str(newest(old)), None)):
        recorder.steps[:] = first
        folder = None if place is None else tmp_path / f"new {number}"
        job = trainer(recorder, "sync", 2, checkpoint=folder, resume=place or newest(old))
        check(recorder, job.fit(), 3)
        assert folder is None or newest(folder).name.startswith("step-000000000018-")
    assert sorted(old.iterdir()) == files


def test_nothing_to_go_on_from_is_a_fresh_start_or_an_error(tmp_path: Path, recorder: StepRecorder) -> None:
    check(recorder, trainer(recorder, "sync", 2, checkpoint=tmp_path / "new", resume=True).fit(), 3)
    for place in (tmp_path / "nobody", tmp_path):
        with pytest.raises(CheckpointError, match=r"nobody|holds no checkpoint"):
            trainer(recorder, "sync", 2, resume=place).start()


def test_the_folder_of_another_run_is_refused(tmp_path: Path, recorder: StepRecorder) -> None:
    trainer(recorder, "sync", 2, checkpoint=tmp_path, epochs=1).fit()
    for resume in (False, stop_at(recorder, 8, trainer(recorder, "sync", 1, **ENDLESS))):
        with pytest.raises(OptionError, match="holds checkpoints of another run"):
            trainer(recorder, "sync", 2, checkpoint=tmp_path, resume=resume).start()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": nn.Linear(1, 1)}, "another model: 'trained' is float32"),
        ({"samples": 22, "model": Counts()}, "the dataset had 23 samples, it has 22 samples now"),
        ({"per_device_batch_size": 5}, "batch_size was 4, it is 5 now.*per_device_batch_size=4 keeps it"),
        ({"seed": 1}, "seed was 0, it is 1 now"),
        ({"reading": flowdp.ReadingOptions(shuffle=False)}, "shuffle was True, it is False now"),
    ],
)
def test_what_has_changed_is_named(
    tmp_path: Path, recorder: StepRecorder, changed: dict[str, Any], named: str
) -> None:
    stop_at(recorder, 2, trainer(recorder, "sync", 2, checkpoint=tmp_path))
    options: dict[str, Any] = {"checkpoint": tmp_path, "resume": True}
    with pytest.raises(CheckpointError, match=named) as caught:
        trainer(recorder, **{"policy": "sync", "devices": 2, **options, **changed}).start()
    assert caught.value.path == str(newest(tmp_path))


# ---------------------------------------------------------------- broken files
def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_one_before_a_broken_one_is_taken(
    tmp_path: Path, recorder: StepRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    written = Written()
    trainer(
        recorder, "sync", 2, checkpoint=tmp_path, callbacks=[flowdp.OnCheckpoint(written)], epochs=1
    ).fit()
    trainer(
        recorder,
        "sync",
        2,
        checkpoint=tmp_path,
        callbacks=[flowdp.OnCheckpoint(written)],
        resume=True,
        epochs=2,
    ).fit()
    spoil(newest(tmp_path))
    recorder.steps[:] = [step for step in recorder.steps if step.epoch < 1]
    check(recorder, trainer(recorder, "sync", 2, checkpoint=tmp_path, resume=True).fit(), 3)
    [warning] = [one for one in caplog.messages if "the one before it is taken" in one]
    assert "step-000000000012" in warning


def test_when_all_are_broken_nothing_begins_anew(tmp_path: Path, recorder: StepRecorder) -> None:
    trainer(recorder, "sync", 2, checkpoint=tmp_path).fit()
    files = sorted(tmp_path.glob("*.pt"))
    for file in files:
        spoil(file)
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints in"):
        trainer(recorder, "sync", 2, checkpoint=tmp_path, resume=True).start()
    assert sorted(tmp_path.glob("*.pt")) == files
    with pytest.raises(CheckpointError):
        trainer(recorder, "sync", 2, resume=files[0]).start()


def test_a_full_disk_is_reported_and_the_run_goes_on(
    tmp_path: Path, recorder: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    failed = threading.Event()

    def full(file: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(28, "No space left on device")
        fsync(file)

    def patient(model: nn.Module, batch: Any) -> Tensor:
        assert flowdp.current_worker().epoch == 0 or failed.wait(HANG_S)
        return count(model, batch)

    monkeypatch.setattr(os, "fsync", full)
    written = Written()
    run = trainer(
        recorder,
        "sync",
        2,
        loss=patient,
        checkpoint=tmp_path,
        callbacks=[flowdp.OnCheckpoint(written)],
        epochs=4,
    ).start()
    check(recorder, run.join(HANG_S), 4)
    [problem] = run.status().problems
    assert "No space left on device" in problem
    assert written.all[-1].epoch == 4
