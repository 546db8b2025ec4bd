"""Tests of the virtual cluster that trains: its mathematics are those of plain torch, its clock is exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.quality.cluster import Settings, train
from bench.quality.tasks import Data, Task
from flowdp.data.epoch_order import epoch_order

SAMPLES, TEST, BATCH, EPOCHS = 96, 40, 16, 4
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES + TEST, 6, generator=DRAW)
Y = (X.sum(1) > 0).long()


def data() -> tuple[Data, Data]:
    return (X[:SAMPLES], Y[:SAMPLES]), (X[SAMPLES:], Y[SAMPLES:])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


TASK = Task("test", data, net, sgd, BATCH, EPOCHS, fixed=0.0)


def by_hand(seed: int) -> float:
    """Loss on the test part of a plain loop with the same schedule."""
    torch.manual_seed(seed)
    model = net()
    optimizer = sgd(model.parameters())
    steps = EPOCHS * SAMPLES // BATCH
    done = 0
    for epoch in range(EPOCHS):
        for index in epoch_order(SAMPLES, seed, epoch).split(BATCH):
            optimizer.param_groups[0]["lr"] = 0.2 * (1 + math.cos(math.pi * done / steps)) / 2
            optimizer.zero_grad()
            F.cross_entropy(model(X[index]), Y[index]).backward()
            optimizer.step()
            done += 1
    with torch.no_grad():
        loss: Tensor = F.cross_entropy(model(X[SAMPLES:]), Y[SAMPLES:])
    return float(loss)


@pytest.mark.parametrize("seed", [0, 3])
def test_one_device_is_a_plain_loop(seed: int) -> None:
    assert train(TASK, Settings(speeds=(1.0,)), seed)[-1].loss == pytest.approx(by_hand(seed), rel=1e-5)


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 2.5), (1.0, 1.0, 2.0, 4.0)])
def test_exact_with_the_batch_kept_is_one_device(speeds: tuple[float, ...]) -> None:
    found = train(TASK, Settings(speeds=speeds, policy="exact", batch="total"), 0)[-1]
    assert found.loss == pytest.approx(by_hand(0), rel=1e-4)
    assert found.samples == SAMPLES * EPOCHS


def test_the_clock_is_that_of_the_devices() -> None:
    steps = EPOCHS * SAMPLES // BATCH
    [alone, slow] = [train(TASK, Settings(speeds=(speed,)), 0)[-1].wall_ms for speed in (1.0, 3.0)]
    assert alone == pytest.approx(10.0 * steps, rel=0.05)
    assert slow == pytest.approx(3 * alone, rel=0.02)
