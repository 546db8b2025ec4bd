"""Tests of resuming under another policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flowdp

SAMPLES = 48


def fit(policy: Any, folder: Path, epochs: int) -> flowdp.TrainedState:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 4)
    return flowdp.Trainer(
        model=nn.Linear(4, 2),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=(inputs, (inputs.sum(1) > 0).long()),
        per_device_batch_size=4,
        epochs=epochs,
        policy=policy,
        devices=["cpu", "cpu"],
        checkpoint=folder,
        resume=True,
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=False),
    ).fit()


# With exact, replicas and optimizers must be equal; otherwise each rank had its own.
@pytest.mark.parametrize(
    ("before", "after"),
    [("sync", "cadence"), ("cadence", "exact"), ("exact", "async"), ("async", "sync")],
    ids="-".join,
)
def test_a_run_goes_on_under_another_policy(before: str, after: str, tmp_path: Path) -> None:
    first = fit(before, tmp_path, epochs=1)
    state = fit(after, tmp_path, epochs=2)
    assert [record.epoch for record in state.history] == [0, 1]
    assert state.global_step > first.global_step
    assert sum(part.samples for part in state.history[1].per_rank) == SAMPLES
