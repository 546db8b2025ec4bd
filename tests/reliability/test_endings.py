"""Tests of runs that are ended early: their state, and results while they continue."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flowdp
from flowdp.checkpoint.file import read
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import ENDLESS, SAMPLES, Written, held_at, same, trainer

POLICIES = ("sync", "cadence", "async", "exact")


def newest(folder: Path) -> dict[str, Any]:
    return read(max(folder.glob("step-*.pt"), key=lambda path: int(path.stem.split("-")[2])))


# ---------------------------------------------------------------- early ends
@pytest.mark.parametrize("policy", POLICIES)
def test_stop_leaves_a_checkpoint_of_the_last_round(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    with held_at(recorder, 9) as inside:
        run = trainer(recorder, policy, 2, checkpoint=tmp_path, **ENDLESS).start()
        with inside():
            run.stop()
    state = run.join(HANG_S)
    assert state.interrupted
    kept = newest(tmp_path)
    assert kept["global_step"] == state.global_step
    same(kept["model"], dict(state.state_dict))
    assert run.status().problems == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_max_time_stops_a_run_that_goes_on_exactly_there(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    run = trainer(recorder, policy, 2, checkpoint=tmp_path, epochs=None, max_time=0.3).start()
    state = run.join(HANG_S)
    assert state.interrupted
    assert newest(tmp_path)["global_step"] == state.global_step > 0
    epochs = state.epochs_done + 2
    assert not trainer(recorder, policy, 3, checkpoint=tmp_path, resume=True, epochs=epochs).fit().interrupted
    for epoch in range(epochs):
        assert recorder.samples(epoch) == dict.fromkeys(range(SAMPLES), 1), epoch


def test_max_time_ends_a_pause(recorder: StepRecorder) -> None:
    run = trainer(recorder, "cadence", 2, max_time=timedelta(seconds=0.3), **ENDLESS).start()
    run.pause()
    assert run.join(HANG_S).interrupted


@pytest.mark.posix
@pytest.mark.parametrize("policy", ["sync"])
def test_sigterm_stops_where_that_was_asked_for(tmp_path: Path, recorder: StepRecorder, policy: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with held_at(recorder, 9) as inside:
        run = trainer(
            recorder,
            policy,
            2,
            checkpoint=tmp_path,
            runtime=flowdp.RuntimeOptions(handle_sigterm=True),
            **ENDLESS,
        ).start()
        with inside():
            os.kill(os.getpid(), signal.SIGTERM)
    state = run.join(HANG_S)
    assert state.interrupted
    assert run.status().reason == "SIGTERM"
    assert newest(tmp_path)["global_step"] == state.global_step
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------- results during the run
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_snapshot_is_of_one_moment(recorder: StepRecorder, policy: str, devices: int) -> None:
    with held_at(recorder, 9) as inside:
        run = trainer(recorder, policy, devices, **ENDLESS).start()
        with inside():
            pass
        recorder.before = None
        steps = []
        for _ in range(5):
            state = run.snapshot()
            assert state.interrupted
            assert len(state.history) == state.epochs_done
            steps.append(state.global_step)
            if devices == 1 and policy != "exact":
                trained = int(state.state_dict["trained"].sum())
                epochs, inside_epoch = divmod(state.global_step, 6)
                # One batch of an epoch is one sample short.
                assert trained - epochs * SAMPLES in (4 * inside_epoch, 4 * inside_epoch - 1)
                assert epochs == state.epochs_done
        assert steps == sorted(steps)
        with run.paused():
            paused = run.snapshot()
            same(dict(run.snapshot().state_dict), dict(paused.state_dict))
        run.stop()
        ended = run.join(HANG_S)
    assert paused.global_step <= ended.global_step
    assert run.snapshot() is ended


@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_on_demand(tmp_path: Path, recorder: StepRecorder, policy: str) -> None:
    written = Written()
    folder = flowdp.CheckpointOptions(tmp_path, every=10**6, unit="step")
    run = trainer(
        recorder, policy, 2, checkpoint=folder, callbacks=[flowdp.OnCheckpoint(written)], **ENDLESS
    ).start()
    for number in (1, 2):
        run.checkpoint()
        written.wait(lambda all, number=number: len(all) == number)
    with run.paused():
        run.checkpoint()
        written.wait(lambda all: len(all) == 3)
    run.stop()
    state = run.join(HANG_S)
    assert [one.version for one in written.all[:3]] == [1, 2, 3]
    last = written.all[-1]
    assert last.global_step == state.global_step
    same(dict(last.state_dict), dict(state.state_dict))
    kept = read(last.path)
    assert (kept["version"], kept["global_step"]) == (last.version, last.global_step)
    last.save(tmp_path / "elsewhere.pt")
    same(read(tmp_path / "elsewhere.pt")["model"], kept["model"])
