"""Tests of `setup` on two devices against torch's own DistributedDataParallel, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from tests.torch_world import in_processes

STEPS, BATCH_SIZE, ACCUMULATION = 50, 16, 2
OPTIMIZERS = ["sgd", "adamw"]


@pytest.fixture
def lanes() -> None:
    """Plain CPU devices, as on the other side."""


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    groups: Any = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(
    call: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, ranks: int = 1
) -> dict[str, Tensor]:
    """A loop as on both sides; with several ranks each takes its part of every batch."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draw = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            x = torch.randn(BATCH_SIZE, 5, generator=draw, dtype=torch.float64)
            y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
            x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
            (F.cross_entropy(call(x), y) / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def distributed(rank: int) -> list[dict[str, list[Any]]]:
    """One of the two processes."""
    states = []
    for kind in OPTIMIZERS:
        model = network()
        call = nn.parallel.DistributedDataParallel(model)
        state = train(call, model, optimizer_of(model, kind), rank, 2)
        states.append({name: value.tolist() for name, value in state.items()})
    return states


def test_equals_distributed_data_parallel(tmp_path: Path) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo, so torch's own DistributedDataParallel cannot run on the CPU")
    first, second = in_processes(distributed, tmp_path, 2)
    assert first == second
    for kind, theirs in zip(OPTIMIZERS, first, strict=True):
        model = network()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = optimizer_of(model, kind)
        with flowdp.setup(model, optimizer, devices=["cpu"] * 2, cadence=False) as dp:
            ours = train(dp, dp, optimizer)
            assert dp.training_step == STEPS
        for name, value in ours.items():
            expected = torch.tensor(theirs[name], dtype=torch.float64)
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)
            assert not torch.equal(value, start[name])
