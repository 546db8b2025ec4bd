"""Tests of runs that resume another run's state: `resume=run.state`."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import flowdp
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import SAMPLES, Counts, count, stop_at, trainer


def losing(*losses: float) -> Any:
    """A loss that counts samples, and has this value in each epoch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker, own = flowdp.current_worker(), count(model, batch)
        assert worker is not None
        return own - own.detach() + losses[min(worker.epoch, len(losses) - 1)]

    return loss


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


# ---------------------------------------------------------------- missing from the state


@pytest.mark.parametrize(
    ("lr", "expected"), [(1.0, [1.0, 1.0, 0.1, 0.01, 0.001]), (0.5, [1.0, 1.0, 0.1, 0.5, 0.5])]
)
def test_the_learning_rate_goes_on_too_unless_it_begins_with_another(
    recorder: StepRecorder, lr: float, expected: list[float]
) -> None:
    options: dict[str, Any] = {
        "loss": losing(1.0),
        "scheduler": flowdp.SchedulerOptions(
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0), unit="epoch"
        ),
        "epochs": 5,
    }
    state = stop_at(recorder, 6 * 3 + 3, trainer(recorder, "sync", 1, **options))
    options["optimizer"] = lambda params: torch.optim.SGD(params, lr)
    again = trainer(recorder, "sync", 1, resume=state, **options).fit()
    assert [record.lr for record in again.history] == pytest.approx(expected)
