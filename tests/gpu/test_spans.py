"""Tests of exact on cards that step a span each: the parameters of one device, and equal replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.data.epoch_order import epoch_order

SAMPLES, WINDOW, STEPS = 160, 13, 30
X = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
Y = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def plain(clip: float | None) -> nn.Module:
    model = net()
    optimizer = adamw(model.parameters())
    windows = (
        window for epoch in itertools.count() for window in epoch_order(SAMPLES, 0, epoch).split(WINDOW)
    )
    for index in itertools.islice(windows, STEPS):
        mse(model, (X[index], Y[index])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check(devices: Sequence[Any], clip: float | None, **options: Any) -> None:
    model = net()
    run = flowdp.Trainer(
        model, adamw, mse, dataset=(X, Y), batch_size=WINDOW, max_steps=STEPS, devices=devices,
        policy="exact", max_grad_norm=clip, progress=False, **options,
    ).start()  # fmt: skip
    replicas = run._engine.replicas
    run.join()
    for mine, expected in zip(model.parameters(), plain(clip).parameters(), strict=True):
        assert torch.allclose(mine.cpu(), expected, rtol=1e-9, atol=1e-9)
    for replica in replicas[1:]:
        for mine, first in zip(replica.flat.memories, replicas[0].flat.memories, strict=True):
            assert torch.equal(mine.cpu(), first.cpu())


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("count", [2, 3])
def test_as_one_device(ranks, count, clip):
    check(ranks(count), clip)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["nccl", "local"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_between_cards(backend, clip):
    check(["cuda:0", "cuda:1"], clip, runtime=flowdp.RuntimeOptions(backend=backend))
