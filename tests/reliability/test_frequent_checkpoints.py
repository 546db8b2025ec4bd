"""Checkpoints after every step: they change no bit of the training, and the last one is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowdp

STEPS = 60


def trained(policy: Any, checkpoint: flowdp.CheckpointOptions | None) -> flowdp.TrainedState:
    torch.manual_seed(0)
    batch: dict[str, Any] = {"batch_size": 4}
    if policy == "exact":
        batch = {
            "global_batch_size": 8,
            "batch_size": 4,
            "runtime": flowdp.RuntimeOptions(partition_ratios=(0.5, 0.5)),
        }
    return (
        flowdp.Trainer(
            model=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            loss=lambda model, data: model(data).square().mean(),
            dataset=torch.randn(4096, 16, generator=torch.Generator().manual_seed(1)),
            max_steps=STEPS,
            devices=["cpu", "cpu"],
            policy=policy,
            checkpoint=checkpoint,
            progress=False,
            **batch,
        )
        .start()
        .join()
    )


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_checkpoints_after_every_step_change_no_bit_and_the_last_one_is_there(
    policy: str, tmp_path: Path
) -> None:
    plain = trained(policy, None)
    options = flowdp.CheckpointOptions(tmp_path / "run", every=1, unit="step", keep_last=1000)
    saved = trained(policy, options)
    for name, value in plain.state_dict.items():
        assert torch.equal(value, saved.state_dict[name])
    last = flowdp.load_checkpoint(tmp_path / "run")
    for name, value in plain.state_dict.items():
        assert torch.equal(value, last.state_dict[name])
