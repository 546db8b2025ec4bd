"""One run through each public entry, compared with one device; a quick check before a push."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from tests.collective.fake_world import in_threads

DEVICES = ["cpu", "cpu"]
STEPS = 6
torch.manual_seed(0)
BASE = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
X, Y = torch.randn(8 * STEPS, 4, dtype=torch.float64), torch.randn(8 * STEPS, 2, dtype=torch.float64)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), Y.split(size), strict=True))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    model = copy.deepcopy(BASE)
    optimizer = sgd(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model.state_dict()


def check(state: Any, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=1e-10)


def test_trainer(expected: dict[str, Tensor]) -> None:
    trainer = flowdp.Trainer(
        model=copy.deepcopy(BASE),
        optimizer=sgd,
        loss=loss_of,
        dataset=DataLoader(TensorDataset(X, Y), 8),
        epochs=1,
        devices=DEVICES,
        policy="exact",
        progress=False,
    )
    state = trainer.start().join()
    assert state.global_step == STEPS
    check(state.state_dict, expected)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_trainer_trains_each_sample_once(policy: Any) -> None:
    run = flowdp.Trainer(
        model=copy.deepcopy(BASE),
        optimizer=sgd,
        loss=loss_of,
        dataset=(X, Y),
        per_device_batch_size=4,
        epochs=2,
        devices=DEVICES,
        policy=policy,
        progress=False,
    ).start()
    history = run.join().history
    assert [sum(rank.samples for rank in epoch.per_rank) for epoch in history] == [len(X)] * 2


def test_setup(expected: dict[str, Tensor]) -> None:
    model = copy.deepcopy(BASE)
    optimizer = sgd(model.parameters())
    with flowdp.setup(model, optimizer, devices=DEVICES, progress=False) as moved:
        for batch in batches():
            optimizer.zero_grad()
            loss_of(moved, batch).backward()
            optimizer.step()
        assert moved.training_step == STEPS
    check(model.state_dict(), expected)


def test_ddp(expected: dict[str, Tensor]) -> None:
    def backward(rank: int, model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
        loss_of(model, batch).backward()
        return len(batch[0])

    with flowdp.Ddp.wrap([copy.deepcopy(BASE) for _ in DEVICES], DEVICES) as ddp:
        optimizers = [sgd(model.parameters()) for model in ddp.models]
        for x, y in batches():
            counts = ddp.parallel(backward, [(x[:6], y[:6]), (x[6:], y[6:])])
            ddp.weighted_all_reduce_gradients(counts)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model in ddp.models:
            check(model.state_dict(), expected)


def test_distributed_data_parallel(expected: dict[str, Tensor]) -> None:
    groups = flowdp.local_groups(len(DEVICES))

    def train(rank: int) -> dict[str, Tensor]:
        model = flowdp.DistributedDataParallel(copy.deepcopy(BASE), groups[rank])
        optimizer = sgd(model.parameters())
        for batch in batches(4)[rank :: len(DEVICES)]:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        return model.module.state_dict()

    for state in in_threads(range(len(DEVICES)), train):
        check(state, expected)


def test_simulate() -> None:
    prediction = flowdp.simulate([10, 20], batches=300)
    assert prediction.shares == pytest.approx((2 / 3, 1 / 3), abs=0.02)
    assert prediction.speedup == pytest.approx(1.5, abs=0.1)
