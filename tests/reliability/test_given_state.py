"""Tests of runs that resume another run's state: `resume=run.state`."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

import flowdp
from flowdp import EarlyStopping
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import SAMPLES, WAIT_S, Counts, count, held_at, stop_at, trainer
from tests.reliability.test_resume import ALL, POLICIES, Stream, check


def losing(*losses: float) -> Any:
    """A loss that counts samples, and has this value in each epoch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker, own = flowdp.current_worker(), count(model, batch)
        assert worker is not None
        return own - own.detach() + losses[min(worker.epoch, len(losses) - 1)]

    return loss


def test_from_what_another_run_has_made(recorder: StepRecorder) -> None:
    first = trainer(recorder, "sync", 2, epochs=1).fit()
    state = trainer(recorder, "sync", 3, resume=first).fit()
    check(recorder, state, 3)
    assert (state.history[0], state.global_step) == (first.history[0], 18)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_stopped_inside_an_epoch_goes_on_there(
    recorder: StepRecorder, policy: str, devices: int
) -> None:
    first = stop_at(recorder, 8, trainer(recorder, policy, 2))
    assert first.interrupted
    state = trainer(recorder, policy, devices, resume=first).fit()
    check(recorder, state, 3)
    assert state.global_step == (9 if policy == "exact" else 18)


def test_what_max_steps_has_cut_goes_on_there(recorder: StepRecorder) -> None:
    first = trainer(recorder, "sync", 2, epochs=None, max_steps=8).fit()
    assert not first.interrupted
    assert (first.epochs_done, [one.is_complete for one in first.history]) == (1, [True, False])
    second = trainer(recorder, "sync", 1, resume=first).fit()
    check(recorder, second, 3)
    assert (second.epochs_done, [one.is_complete for one in second.history]) == (3, [True] * 3)


def test_what_max_steps_has_cut_is_begun_anew_with_other_batches(recorder: StepRecorder) -> None:
    first = trainer(recorder, "sync", 1, epochs=None, max_steps=8).fit()
    recorder.steps.clear()
    trainer(recorder, "sync", 1, resume=first, epochs=2, per_device_batch_size=2).fit()
    assert recorder.samples(0) == Counter()
    assert recorder.samples(1) == ALL


@pytest.mark.parametrize("changed", [{"per_device_batch_size": 5}, {"samples": 22}, {"seed": 1}])
def test_where_the_batches_are_others_the_epoch_begins_anew(
    recorder: StepRecorder, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = stop_at(recorder, 8, trainer(recorder, "sync", 1))
    recorder.steps.clear()
    changed = {"model": Counts(), "resume": first} | changed
    with caplog.at_level(logging.WARNING, "flowdp"):
        state = trainer(recorder, "sync", 1, **changed).fit()
    assert "the epoch in which the given state stood begins anew" in caplog.text
    assert state.epochs_done == 3
    for epoch, times in enumerate((0, 1, 1)):
        assert recorder.samples(epoch) == Counter(
            {n: times for n in range(changed.get("samples", SAMPLES)) if times}
        )


def test_a_stream_begins_the_epoch_anew(recorder: StepRecorder) -> None:
    first = stop_at(recorder, 8, trainer(recorder, "sync", 1, dataset=Stream()))
    assert first.epochs_done == 1
    recorder.steps.clear()
    again = Stream()
    trainer(recorder, "sync", 1, dataset=again, resume=first).fit()
    assert again.epochs == [1, 2]
    assert (recorder.samples(1), recorder.samples(2)) == (ALL, ALL)


# ---------------------------------------------------------------- missing from the state
def test_a_plateau_is_not_told_an_old_loss_again(recorder: StepRecorder) -> None:
    options: dict[str, Any] = {
        "loss": losing(1.0, 0.5, 0.3, 0.2, 0.1),
        "scheduler": flowdp.SchedulerOptions(
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=1), unit="epoch"
        ),
        "epochs": 5,
    }
    state = stop_at(recorder, 6 * 3 + 3, trainer(recorder, "sync", 1, **options))
    assert state.epochs_done == 3
    again = trainer(recorder, "sync", 1, resume=state, **options).fit()
    assert [record.lr for record in again.history] == [1.0] * 5


@pytest.mark.parametrize("way", ["run.state", "snapshot"])
@pytest.mark.parametrize(
    ("lr", "expected"), [(1.0, [1.0, 1.0, 0.1, 0.01, 0.001]), (0.5, [1.0, 1.0, 0.1, 0.5, 0.5])]
)
def test_the_learning_rate_goes_on_too_unless_it_begins_with_another(
    recorder: StepRecorder, lr: float, expected: list[float], way: str
) -> None:
    options: dict[str, Any] = {
        "loss": losing(1.0),
        "scheduler": flowdp.SchedulerOptions(
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0), unit="epoch"
        ),
        "epochs": 5,
    }
    job = trainer(recorder, "sync", 1, **options)
    if way == "run.state":
        state = stop_at(recorder, 6 * 3 + 3, job)
    else:
        with held_at(recorder, 6 * 3 + 3) as inside:
            run = job.start()
            with inside():
                asked: list[flowdp.TrainedState] = []
                asking = threading.Thread(target=lambda: asked.append(run.snapshot()))
                asking.start()
                records = run._engine.records
                with records._changed:
                    assert records._changed.wait_for(lambda: records._taken_requests, WAIT_S)
            asking.join(WAIT_S)
        run.join(WAIT_S)
        [state] = asked
    options["optimizer"] = lambda params: torch.optim.SGD(params, lr)
    again = trainer(recorder, "sync", 1, resume=state, **options).fit()
    assert [record.lr for record in again.history] == pytest.approx(expected)


@pytest.mark.parametrize("steps", [6 * 3, 6 * 3 + 3])
def test_the_learning_rate_goes_on_with_other_batches_too(recorder: StepRecorder, steps: int) -> None:
    options: dict[str, Any] = {
        "loss": losing(1.0),
        "scheduler": flowdp.SchedulerOptions(
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0), unit="epoch"
        ),
    }
    state = trainer(recorder, "sync", 1, epochs=None, max_steps=steps, **options).fit()
    again = trainer(recorder, "sync", 1, resume=state, epochs=5, per_device_batch_size=2, **options).fit()
    assert max(record.lr for record in again.history[3:]) < 0.11  # 1.0 in the first epochs of a new one


def test_the_best_model_stood_elsewhere(recorder: StepRecorder) -> None:
    best = EarlyStopping("loss", patience=9, mode="min", restore_best=True)
    job = trainer(recorder, "sync", 1, loss=losing(1.0, 5.0, 9.0), epochs=5, callbacks=[best])
    state = stop_at(recorder, 15, job)
    assert state.epochs_done == 2
    assert (state.state_dict["trained"] == 1).all()
    recorder.steps.clear()
    again = trainer(recorder, "sync", 1, resume=state).fit()
    assert recorder.samples(2) == ALL
    assert (again.state_dict["trained"] == 2).all()


def test_who_goes_on_after_an_early_stop_is_given_its_patience_anew(recorder: StepRecorder) -> None:
    def stopping() -> EarlyStopping:
        return EarlyStopping("loss", patience=2, mode="min")

    options: dict[str, Any] = {"loss": losing(1.0), "epochs": 9}
    state = trainer(recorder, "sync", 1, callbacks=[stopping()], **options).fit()
    assert state.epochs_done == 3
    again = trainer(recorder, "sync", 1, callbacks=[stopping()], resume=state, **options).fit()
    assert again.epochs_done == 5


def test_an_epoch_that_was_only_opened_is_not_begun(recorder: StepRecorder) -> None:
    state = stop_at(recorder, 15, trainer(recorder, "sync", 2, epochs=9))
    assert state.stopped_at is not None
    assert all(one.position == 0 for one in state.stopped_at.position.open[1:])  # dealt ahead, and taken back
    assert trainer(recorder, "sync", 2, epochs=state.epochs_done + 1, resume=state).fit().epochs_done == 3


class Drawing(Dataset[Any]):
    """Samples with a number drawn by their process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


def test_processes_do_not_draw_the_same_numbers_again(recorder: StepRecorder) -> None:
    drawn: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        drawn.extend(batch[1].tolist())
        return count(model, batch)

    draw = torch.Generator().manual_seed(3)
    loader = DataLoader(Drawing(), 4, shuffle=True, num_workers=1, generator=draw)
    options: dict[str, Any] = {
        "dataset": loader,
        "loss": loss,
    }
    state = stop_at(recorder, 9, trainer(recorder, "sync", 1, **options))
    trainer(recorder, "sync", 1, resume=state, **options).fit()
    assert len(set(drawn)) == len(drawn)
