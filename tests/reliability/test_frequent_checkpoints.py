"""Checkpoints after every step: they change no bit of the training, and the last one is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowdp

STEPS = 60


def trained(policy: Any, checkpoint: flowdp.CheckpointOptions | None) -> tuple[flowdp.TrainedState, Any]:
    torch.manual_seed(0)
    ratios = (0.5, 0.5) if policy == "exact" else None  # which fix the bits
    run = flowdp.Trainer(
        model=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        loss=lambda model, data: model(data).square().mean(),
        dataset=torch.randn(4096, 16, generator=torch.Generator().manual_seed(1)),
        batch_size=8,
        max_steps=STEPS,
        devices=["cpu", "cpu"],
        policy=policy,
        checkpoint=checkpoint,
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios),
        progress=False,
    ).start()
    state = run.join()
    return state, run.status().problems


def test_where_the_budget_is_spent_the_next_one_is_that_of_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the run says so, once, with the measured cost."""
    monkeypatch.setattr("flowdp.policy.save_budget.SHARE", 1e-12)
    options = flowdp.CheckpointOptions(tmp_path / "run", every=1, unit="step", keep_last=1000)
    state, problems = trained("sync", options)
    assert state.global_step == STEPS
    first, last = sorted((tmp_path / "run").glob("step-*.pt"))
    assert flowdp.load_checkpoint(last).global_step == STEPS
    assert flowdp.load_checkpoint(first).global_step < STEPS
    assert len(problems) <= 1  # none where the first file was still being written at the end
    assert all("checkpoint" in told for told in problems)
