"""Tests of seeds: the same bits for one seed if the clock plays no part; another order for another seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import flowdp
from flowdp.device.worker_context import CurrentWorker

pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH_SIZE, EPOCHS = 203, 8, 2


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[1]), batch[0] % 10)


def train(recorder: Any, policy: Any, devices: int, seed: int) -> flowdp.TrainedState:
    torch.manual_seed(5)
    recorder.steps.clear()
    return flowdp.Trainer(
        nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        lambda params: torch.optim.Adam(params, lr=0.01),
        recorder.watch(loss),
        dataset=(torch.arange(SAMPLES), torch.randn(SAMPLES, 20)),
        per_device_batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        policy=policy,
        seed=seed,
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    ).fit()


def slow_down(worker: CurrentWorker, _: int) -> None:
    """Change times, and so blocks of rounds: rank 1 takes longer, and at times every rank."""
    sum(range(20_000 * (worker.rank == 1) + 20_000 * (worker.local_step % 7 == 0)))


@pytest.mark.parametrize(("policy", "devices"), [("sync", 1), ("sync", 3), ("cadence", 1), ("async", 1)])
def test_two_runs_with_one_seed_are_the_same_bits(recorder, policy, devices):
    first = train(recorder, policy, devices, seed=7)
    recorder.before = slow_down
    second = train(recorder, policy, devices, seed=7)
    assert first.global_step == second.global_step
    for kind in ("state_dict", "optimizer_state"):
        ours, theirs = (tree_leaves(getattr(state, kind)) for state in (first, second))
        assert len(ours) == len(theirs) >= 8
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    for a, b in zip(first.history, second.history, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-12)
        assert [part.samples for part in a.per_rank] == [part.samples for part in b.per_rank]
    third = train(recorder, policy, devices, seed=8)
    assert not torch.equal(first.state_dict["0.weight"], third.state_dict["0.weight"])


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_the_order_is_a_function_of_seed_and_epoch_alone(recorder, policy):
    def order(devices: int, seed: int) -> list[list[tuple[int, ...]]]:
        train(recorder, policy, devices, seed)
        return [
            sorted(step.indices for step in recorder.steps if step.epoch == epoch) for epoch in range(EPOCHS)
        ]

    orders = [order(devices, 7) for devices in (1, 2, 3)]
    assert orders[0] == orders[1] == orders[2]
    other = order(2, 8)
    assert len({tuple(epoch) for epoch in orders[0] + other}) == 2 * EPOCHS
