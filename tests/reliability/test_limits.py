"""Tests of short runs: limited epochs, the same batches in every epoch, and a trial of everything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from bench.cadences import cadence_for
from flowdp import CheckpointError, EvaluationOptions, OptionError
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import BATCH, indices, stop_at, trainer

POLICIES = ("sync", "cadence", "async", "exact")


def of_a_step(policy: str) -> int:
    """Samples of a batch, of which `limit_batches` counts the number."""
    return 2 * BATCH if policy == "exact" else BATCH


# ---------------------------------------------------------------- limit_batches
@pytest.mark.parametrize("policy", POLICIES)
def test_a_limited_epoch_is_as_long_for_all(recorder: StepRecorder, policy: str) -> None:
    job = trainer(recorder, policy, 2, limit_batches=2)
    assert job.total_steps == 6
    state = job.fit()
    assert state.global_step == 6
    assert (state.epochs_done, state.interrupted) == (3, False)
    assert all(epoch.is_complete for epoch in state.history)
    seen = [recorder.samples(epoch) for epoch in range(3)]
    assert all(len(samples) == 2 * of_a_step(policy) and set(samples.values()) == {1} for samples in seen)
    assert seen[0] != seen[1]  # shuffled anew
    half = trainer(recorder, policy, 2, limit_batches=0.5)
    assert half.total_steps == 3 * (1 if policy == "exact" else 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_limited_epoch_goes_on_where_it_was_left(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path, "samples": 60}
    steps = 40 // of_a_step(policy)
    state = stop_at(recorder, 6, trainer(recorder, policy, 2, limit_batches=steps, **options))
    assert state.interrupted
    if state.stopped_at is not None and state.stopped_at.position.open:
        with pytest.raises(CheckpointError, match=f"limit_batches was {steps}, it is None now"):
            trainer(recorder, policy, 2, resume=True, **options).start()
    assert not trainer(recorder, policy, 3, limit_batches=steps, resume=True, **options).fit().interrupted
    for epoch in range(3):
        samples = recorder.samples(epoch)
        assert len(samples) == 40, epoch
        assert set(samples.values()) == {1}, epoch


def evaluated(seen: list[int]) -> Any:
    def step(_: object, batch: Any) -> dict[str, float]:
        seen.extend(batch[0].flatten().tolist())
        return {"samples": 1.0}

    return step


# ---------------------------------------------------------------- overfit_batches
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_batches_are_trained_and_evaluated(recorder: StepRecorder, policy: str) -> None:
    seen: list[int] = []
    evaluation = EvaluationOptions((torch.full((5,), -1),), step=evaluated(seen), sanity_check=0)
    trainer(recorder, policy, 2, overfit_batches=2, evaluation=evaluation).fit()
    first = list(range(2 * of_a_step(policy)))
    assert [sorted(recorder.samples(epoch).elements()) for epoch in range(3)] == [first] * 3
    assert sorted(seen) == sorted(first * 3)


# ---------------------------------------------------------------- fast_dev_run
class Calls(flowdp.Callback):
    """Counts its calls."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.checkpoints: list[flowdp.Checkpoint] = []

    def on_train_start(self, run: Any) -> None:
        self.seen["start"] += 1

    def on_epoch_end(self, metrics: Any) -> None:
        self.seen["epoch"] += 1

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.checkpoints.append(checkpoint)

    def on_train_end(self, state: Any) -> None:
        self.seen["end"] += 1


class Logs(Calls):
    skips_dev_run = True


ONCE = {"start": 1, "epoch": 1, "end": 1}


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (1, 3, 2, 3), strict=True)))
def test_a_trial_calls_everything_once(
    tmp_path: Path, recorder: StepRecorder, policy: str, devices: int
) -> None:
    seen: list[int] = []
    calls, logs = Calls(), Logs()
    folder = tmp_path / "none"
    job = trainer(
        recorder,
        policy,
        devices,
        fast_dev_run=True,
        epochs=7,
        max_steps=50,
        checkpoint=folder,
        resume=True,
        evaluation=EvaluationOptions(indices(), step=evaluated(seen), every=4, sanity_check=0),
        callbacks=[calls, logs, flowdp.EarlyStopping("samples", restore_best=True)],
        cadence=cadence_for(policy, anchor=9, speed_hint=(0, 5.0)),
        batch_size=3 * BATCH if policy == "exact" else None,
        timeline=tmp_path / "run.html",
    )
    assert job.total_steps == (1 if policy == "exact" else devices)
    state = job.start().join(HANG_S)
    ranks = Counter(step.rank for step in recorder.steps)
    assert set(ranks) == set(range(devices))
    if policy != "exact":
        assert set(ranks.values()) == {1}
    assert len(seen) == devices * BATCH
    assert state.history[0].eval == {"samples": 1.0}
    assert (state.epochs_done, state.interrupted) == (1, False)
    assert calls.seen == ONCE
    assert [one.path for one in calls.checkpoints] == [None]
    assert not logs.seen
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"limit_batches": 0}, "limit_batches must be a number of batches"),
        ({"limit_batches": 2, "fast_dev_run": True}, "limit_batches=2 and fast_dev_run=True each say"),
        ({"limit_batches": 2, "per_device_batch_size": [4, 2]}, "limit_batches=2 cannot count batches"),
    ],
)
def test_contradictions_are_refused(recorder: StepRecorder, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        trainer(recorder, "sync", 2, **options)
