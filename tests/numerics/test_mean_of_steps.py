"""Tests of rounds against plain PyTorch: every model steps alone, then the mean weighted by samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp

# A mean does not depend on how a batch reached its rank.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH_SIZE, EPOCHS = 60, 8, 3  # 8 batches, the last of 4 samples
LR = 0.02

Data = tuple[Tensor, Tensor, Tensor]


def data() -> Data:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draw)
    return torch.arange(SAMPLES), x, x.sin().sum(1, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def loss(model: nn.Module, batch: Data) -> Tensor:
    return F.mse_loss(model(batch[1]), batch[2])


class ByHand:
    """Models that step on their own, and their mean."""

    def __init__(self, model: nn.Module, count: int, momentum: float) -> None:
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=LR, momentum=momentum) for m in self.models]
        self.data = data()

    def round(self, batches: Sequence[Sequence[Sequence[int]]]) -> float:
        """Train on `batches[rank]`, lists of indices, then take the mean; returns the largest drift."""
        for rank, theirs in enumerate(batches):
            for indices in theirs:
                loss(self.models[rank], tuple(part[list(indices)] for part in self.data)).backward()
                self.optimizers[rank].step()
                self.optimizers[rank].zero_grad()
        counts = [sum(map(len, theirs)) for theirs in batches]
        states = [copy.deepcopy(model.state_dict()) for model in self.models]
        mean = {
            name: torch.stack([state[name] for state in states]).amax(0)
            if not states[0][name].is_floating_point()
            else sum(
                state[name].double() * (n / sum(counts)) for state, n in zip(states, counts, strict=True)
            )
            for name in states[0]
        }
        for model in self.models:
            model.load_state_dict(mean)
        names = [name for name, _ in self.models[0].named_parameters()]
        # A replica without a step, on a busy machine, has no drift.
        trained = [state for state, n in zip(states, counts, strict=True) if n]
        away = [math.sqrt(sum(float((s[n] - mean[n]).square().sum()) for n in names)) for s in trained]
        return max(away) / math.sqrt(sum(float(mean[n].square().sum()) for n in names))


def train(recorder: Any, model: nn.Module, devices: int, momentum: float = 0.0, **options: Any) -> flowdp.Run:
    return flowdp.Trainer(
        model,
        lambda params: torch.optim.SGD(params, lr=LR, momentum=momentum),
        recorder.watch(loss),
        dataset=data(),
        per_device_batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        progress=False,
        **{
            "policy": "cadence",
            "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
        }
        | options,
    ).start()


def check_equal(run: flowdp.Run, hand: ByHand, tolerance: float) -> None:
    run.join()
    for replica, model in zip(run._engine.replicas, hand.models, strict=True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                replica.module.state_dict()[name],
                value,
                rtol=0,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def rounds_of(recorder: Any, devices: int) -> list[list[list[tuple[int, ...]]]]:
    """Batches trained: `[round][rank]`, lists of indices."""
    before = sorted({step.round for step in recorder.steps})
    return [
        [[step.indices for step in recorder.of(rank) if step.round == round] for rank in range(devices)]
        for round in before
    ]


@pytest.mark.parametrize(("devices", "momentum"), [(1, 0.9), (2, 0.0), (3, 0.9)])
def test_sync_is_the_mean_after_every_step(recorder, devices, momentum):
    model = network()
    hand = ByHand(model, devices, momentum)
    run = train(
        recorder, model, devices, momentum, policy="sync", reading=flowdp.ReadingOptions(shuffle=False)
    )
    in_order = [range(SAMPLES)[at : at + BATCH_SIZE] for at in range(0, SAMPLES, BATCH_SIZE)]
    for _ in range(EPOCHS):
        for at in range(0, len(in_order), devices):
            hand.round([[batch] for batch in in_order[at : at + devices]] + [[]] * (at + devices - 8))
    check_equal(run, hand, 1e-6)
    tracked = run.join().state_dict["1.num_batches_tracked"]
    assert tracked == EPOCHS * math.ceil(len(in_order) / devices)


@pytest.mark.parametrize(
    ("ratios", "quotas", "momentum"),
    [((3, 1), (3, 1), 0.9), ((2, 1, 1), (2, 1, 1), 0.9), ((1, 3), (1, 3), 0.0)],
)
def test_cadence_is_the_mean_after_every_round(recorder, ratios, quotas, momentum):
    model = network()
    hand = ByHand(model, len(ratios), momentum)
    cadence = flowdp.CadenceOptions(anchor=1, max_anchor=1)
    run = train(
        recorder,
        model,
        len(ratios),
        momentum,
        runtime=flowdp.RuntimeOptions(partition_ratios=ratios),
        cadence=cadence,
    )
    # A late round may be over before any rank has begun a step of it, and changes nothing.
    records = [record for record in run.metrics("round") if any(record.steps)]
    trained = rounds_of(recorder, len(ratios))
    assert [record.steps for record in records] == [tuple(map(len, ranks)) for ranks in trained]
    assert records[0].steps == quotas
    drifts = [hand.round(ranks) for ranks in trained]
    check_equal(run, hand, 1e-5)
    measured = [
        (record.drift, drift)
        for record, drift in zip(records, drifts, strict=True)
        if record.drift is not None
    ]
    assert measured
    for given, expected in measured:
        assert given == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("policy", "ratio", "factor"),
    [("sync", 0.0, 1.0), ("sync", "linear", 3.0), ("cadence", 0.5, 2.0), ("async", "sqrt", 3**0.5)],
)
def test_the_learning_rate_grows_with_the_devices(recorder, policy, ratio, factor):
    model = nn.Linear(6, 1, bias=False)
    start = model.weight.detach().clone()
    state = flowdp.Trainer(
        model,
        lambda params: torch.optim.SGD(params, lr=LR),
        recorder.watch(lambda model, batch: model(batch[1]).mean()),
        dataset=data(),
        per_device_batch_size=BATCH_SIZE,
        max_steps=1,
        devices=["cpu"] * 3,
        policy=policy,
        scheduler=flowdp.SchedulerOptions(lr_scaling=ratio),
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    ).fit()
    (step,) = recorder.steps
    assert step.lr == pytest.approx(LR * factor)
    gradient = data()[1][list(step.indices)].mean(0)
    torch.testing.assert_close(state.state_dict["weight"][0], start[0] - LR * factor * gradient)
