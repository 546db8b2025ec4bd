"""Tests of the moving average of the weights: torch's own, the same on all devices, evaluated, saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flowdp
from bench.cadences import cadence_for
from flowdp import EvaluationOptions

# An average does not depend on how a batch reached its rank.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

POLICIES = ("sync", "cadence", "async", "exact")
DECAY, SAMPLES, BATCH = 0.8, 40, 4
NUMBERS = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
DATA = (NUMBERS, NUMBERS.sum(1).sign())


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1])


def make(policy: str, devices: int, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "model": net(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "loss": loss,
        "dataset": DATA,
        "per_device_batch_size": BATCH,
        "epochs": 2,
        "policy": policy,
        "devices": ["cpu"] * devices,
        "cadence": cadence_for(policy, anchor=2, max_anchor=2),
        "reading": flowdp.ReadingOptions(shuffle=False),
        "callbacks": [flowdp.EMA(DECAY), *options.pop("also", ())],
        "progress": False,
        "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    }
    if policy == "exact":
        given["batch_size"] = BATCH * 2
    return flowdp.Trainer(**given | options)


def same(ours: Mapping[str, Tensor] | None, theirs: Mapping[str, Tensor]) -> None:
    assert ours is not None
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def averages_of(run: flowdp.Run) -> list[dict[str, Tensor]]:
    found = [replica.average for replica in run._engine.replicas]
    return [average.named() for average in found if average is not None]


class Kept:
    """Model and average of each checkpoint, by its complete epochs.

    The writer drops one that a newer one overtakes: on a busy machine only the best and the last are sure.
    """

    def __init__(self) -> None:
        self.all: dict[int, tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = {}

    def __call__(self, checkpoint: flowdp.Checkpoint) -> None:
        assert checkpoint.ema is not None
        self.all[checkpoint.epoch] = checkpoint.state_dict, checkpoint.ema


# ---------------------------------------------------------------- the numbers
@pytest.mark.parametrize("policy", POLICIES)
def test_on_one_device_it_is_torchs_step_by_step(policy: str) -> None:
    steps = 7
    state = make(policy, 1, max_steps=steps, epochs=None).fit()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    size = BATCH * 2 if policy == "exact" else BATCH
    parts = list(zip(*(part.split(size) for part in DATA), strict=True))
    for step in range(steps):
        optimizer.zero_grad()
        batch = parts[step % len(parts)]
        chunks = [batch] if policy != "exact" else list(zip(*(p.split(BATCH) for p in batch), strict=True))
        for chunk in chunks:
            (loss(model, chunk) * len(chunk[0]) / size).backward()
        optimizer.step()
        theirs.update_parameters(model)
    assert state.ema is not None
    for name, value in theirs.module.state_dict().items():
        torch.testing.assert_close(state.ema[name], value, rtol=1e-6, atol=1e-6)
    # BatchNorm's statistics are the model's own.
    assert torch.equal(state.ema["1.running_mean"], state.state_dict["1.running_mean"])


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_on_several_devices_it_is_that_of_the_averaged_path(policy: str) -> None:
    wanted: dict[str, Tensor] = {}
    step = 1 if policy == "exact" else 3
    for steps in range(step, 4 * step, step):  # one round more each time
        state = make(policy, 3, max_steps=steps, epochs=None).fit()
        assert state.ema is not None
        for name in ("0.weight", "0.bias", "3.weight"):
            model = state.state_dict[name]
            wanted[name] = wanted[name].lerp(model, 1 - DECAY) if name in wanted else model
            torch.testing.assert_close(state.ema[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_healed_replica_has_the_others_average(policy: str) -> None:
    def poisoned(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        value = loss(model, batch)
        return value * math.nan if worker.rank == 1 and worker.local_step == 2 else value

    run = make(policy, 3, loss=poisoned, epochs=4).start()
    state = run.join()
    assert any("NaN" in problem or "nan" in problem for problem in run.status().problems)
    assert state.ema is not None
    assert all(bool(value.isfinite().all()) for value in state.ema.values())
    first, *others = averages_of(run)
    for other in others:
        same(other, first)


# ---------------------------------------------------------------- evaluation
@pytest.mark.parametrize("policy", POLICIES)
def test_the_average_is_evaluated_and_the_weights_train_on(policy: str) -> None:
    kept = Kept()

    def step(model: nn.Module, _: Any) -> dict[str, float]:
        return {"first": float(model[0].weight[0, 0])}

    evaluation = EvaluationOptions(DATA, step=step)
    also = [flowdp.OnCheckpoint(kept)]
    state = make(policy, 2, evaluation=evaluation, also=also, epochs=3).fit()
    for epochs, (_, ema) in kept.all.items():
        evaluated = state.history[epochs - 1].eval["first"]
        assert evaluated == pytest.approx(float(ema["0.weight"][0, 0]), rel=1e-6)
    same(state.state_dict, kept.all[3][0])
    same(state.ema, kept.all[3][1])
    if policy == "sync":  # not a bit of the training has changed
        same(state.state_dict, make(policy, 2, epochs=3, callbacks=[]).fit().state_dict)


# ---------------------------------------------------------------- kept, and gone on with
@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_a_resumed_run_goes_on_with_it_bit_for_bit(tmp_path: Path, policy: str) -> None:
    runtime: dict[str, Any] = {}
    if policy == "exact":
        tuning = flowdp.ProcessTuning(openmp=False)
        runtime["runtime"] = flowdp.RuntimeOptions(partition_ratios=[1, 1], tune_process=tuning)
    whole = make(policy, 2, epochs=3, **runtime).fit()
    make(policy, 2, epochs=1, checkpoint=tmp_path, **runtime).fit()
    resumed = make(policy, 2, epochs=3, checkpoint=tmp_path, resume=True, **runtime).fit()
    assert whole.ema is not None
    same(resumed.ema, whole.ema)


def test_other_devices_and_a_given_state_go_on_with_it(tmp_path: Path) -> None:
    before = make("sync", 2, epochs=1, checkpoint=tmp_path).fit()
    assert before.ema is not None
    for resume in (True, before):
        folder = tmp_path if resume is True else None
        # No step is left, and then a round of three.
        run = make("sync", 3, checkpoint=folder, resume=resume, max_steps=10).start()
        same(run.join().ema, before.ema)
        for own in averages_of(run):
            assert all(torch.equal(value, before.ema[name]) for name, value in own.items())
    state = make("sync", 3, resume=before, max_steps=13).fit()
    assert state.ema is not None
    wanted = before.ema["0.weight"].lerp(state.state_dict["0.weight"], 1 - DECAY)
    torch.testing.assert_close(state.ema["0.weight"], wanted, rtol=1e-5, atol=1e-6)
