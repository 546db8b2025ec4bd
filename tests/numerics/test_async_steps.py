"""Tests of averaging in parallel with training: every local step counts, and no variance is negative."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from flowdp.device.worker_context import CurrentWorker

# A mean does not depend on how a batch reached its rank.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH_SIZE, LR = 302, 4, 0.125


def slow_down(worker: CurrentWorker, _: int) -> None:
    """Rank r takes r times longer."""
    sum(range(20_000 * worker.rank))


def train(recorder: Any, model: nn.Module, loss: Any, devices: int, **options: Any) -> flowdp.Run:
    draw = torch.Generator().manual_seed(6)
    recorder.before = slow_down
    return flowdp.Trainer(
        model,
        lambda params: torch.optim.SGD(params, lr=LR),
        recorder.watch(loss),
        dataset=(torch.arange(SAMPLES), torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)),
        per_device_batch_size=BATCH_SIZE,
        epochs=4,
        devices=["cpu"] * devices,
        policy="async",
        progress=False,
        **{"runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False))} | options,
    ).start()


@pytest.mark.parametrize(
    "cadence",
    [
        flowdp.CadenceOptions(anchor=2, max_anchor=4),
        flowdp.CadenceOptions(),
        flowdp.CadenceOptions(max_batch_diff=1),
    ],
    ids=["short rounds", "default", "throttled"],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_no_local_step_is_lost(recorder, devices, cadence):
    """With a loss linear in the parameters, a step's gradient is the mean of its samples, at any parameters.

    So the end is the start minus, for each round, the mean over the ranks (weighted by samples) of the sum of
    their steps. A step lost, doubled or counted in the wrong round shows.
    """
    model = nn.Linear(5, 1, bias=False).double()
    expected = model.weight.detach()[0].clone()
    run = train(recorder, model, lambda model, batch: model(batch[1]).mean(), devices, cadence=cadence)
    records = list(run.metrics("round"))
    data = run._engine._parts.services.source.tensors[1]
    left = [iter(recorder.of(rank)) for rank in range(devices)]
    for record in records:
        for steps, mine in zip(record.steps, left, strict=True):
            for step in itertools.islice(mine, steps):
                own = record.samples[step.rank] / sum(record.samples)
                expected -= own * LR * data[list(step.indices)].mean(0)
    assert all(next(mine, None) is None for mine in left)
    assert sum(sum(record.samples) for record in records) == 4 * SAMPLES
    torch.testing.assert_close(run.join().state_dict["weight"][0], expected, rtol=0, atol=1e-12)
    # The last round is a meeting; those before were averaged in parallel with the training.
    assert len(records) > 1


class Guarded(nn.BatchNorm1d):
    """Fails at the first negative variance."""

    def forward(self, x: Tensor) -> Tensor:
        assert (self.running_var >= 0).all(), self.running_var
        return super().forward(x)


@pytest.mark.parametrize("devices", [2, 3])
def test_variances_stay_positive(recorder, devices):
    # Variances halve with every step: adding the difference of two would give values far below zero.
    model = nn.Sequential(Guarded(5, momentum=0.5), nn.Linear(5, 1)).double()
    model[0].running_var.fill_(1e6)
    cadence = flowdp.CadenceOptions(anchor=2, max_anchor=4)
    run = train(recorder, model, lambda model, batch: model(batch[1]).mean(), devices, cadence=cadence)
    records = list(run.metrics("round"))
    assert sum(record.reason != "meeting" for record in records) >= 4
    for replica in run._engine.replicas:
        assert (replica.module[0].running_var >= 0).all()
        assert (replica.module[0].running_var < 1e3).all()
