"""Tests of runs resumed inside an epoch whose order is drawn by the user's sampler."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from flowdp import CheckpointError, EpochMetrics
from flowdp.checkpoint.file import read
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import SAMPLES, stop_at, trainer

CHOSEN = range(1, SAMPLES, 2)


def seeded() -> Any:
    """A loader of single samples whose sampler keeps drawing from one generator."""
    draw = torch.Generator().manual_seed(4)
    return DataLoader([(i,) for i in range(SAMPLES)], 2, sampler=SubsetRandomSampler(CHOSEN, generator=draw))


def run(recorder: StepRecorder, policy: str, folder: Path, loader: Any, **options: Any) -> Any:
    return trainer(recorder, policy, 2, dataset=loader, checkpoint=folder, **options)


def check(recorder: StepRecorder, state: Any, chosen: range) -> None:
    """Assert that both runs together have trained every sample of every epoch once."""
    assert not state.interrupted
    assert [recorder.samples(epoch) for epoch in range(3)] == [Counter(chosen)] * 3
    records: tuple[EpochMetrics, ...] = state.history
    assert [sum(part.samples for part in record.per_rank) for record in records] == [len(chosen)] * 3


@pytest.mark.parametrize("policy", ["sync", "async", "exact"])
def test_a_generator_that_has_moved_on_is_refused_and_a_fresh_one_goes_on(
    tmp_path: Path, recorder: StepRecorder, policy: str
) -> None:
    loader = seeded()
    named = "[12]" if policy == "async" else "2"  # a rank may still be in epoch 1
    # In the second epoch: under exact each rank trains one sample of each batch.
    stop_at(recorder, 20 if policy == "exact" else 10, run(recorder, policy, tmp_path, loader))
    newest = max(tmp_path.glob("step-*.pt"))
    before = len(recorder.steps)
    with pytest.raises(
        CheckpointError, match=rf"epoch {named} is partly .* another order .* fresh sampler"
    ) as error:
        run(recorder, policy, tmp_path, loader, resume=newest).start()
    assert error.value.path == str(newest)
    assert error.value.version == read(newest)["version"]
    assert len(recorder.steps) == before  # nothing was trained by it
    check(recorder, run(recorder, policy, tmp_path, seeded(), resume=True).fit(), CHOSEN)


def unseeded() -> Any:
    """A loader with the default shuffle."""
    return DataLoader([(i,) for i in range(SAMPLES)], 2, sampler=SubsetRandomSampler(CHOSEN))


@pytest.mark.parametrize("make", [seeded, unseeded])
def test_what_a_run_has_made_begins_its_epoch_anew_in_another_order(
    recorder: StepRecorder, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make()
    state = stop_at(recorder, 10, trainer(recorder, "sync", 2, dataset=loader))
    assert state.epochs_done == 1
    recorder.steps.clear()
    with caplog.at_level("WARNING", "flowdp"):
        again = trainer(recorder, "sync", 2, dataset=loader, resume=state).fit()
    assert "stood begins anew: " in caplog.text
    assert again.epochs_done == 3
    assert [recorder.samples(epoch) for epoch in range(3)] == [Counter(), Counter(CHOSEN), Counter(CHOSEN)]


def test_a_sampler_without_a_seed_is_kept_at_the_ends_of_epochs(
    tmp_path: Path, recorder: StepRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    stop_at(recorder, 10, run(recorder, "sync", tmp_path, unseeded()))
    assert "SubsetRandomSampler draws another order each time, so checkpoints are written" in caplog.text
    [only] = tmp_path.glob("step-*.pt")
    assert read(only)["position"].open == ()
    state = run(recorder, "sync", tmp_path, unseeded(), resume=True).fit()
    assert [sum(part.samples for part in record.per_rank) for record in state.history] == [len(CHOSEN)] * 3
