"""Tests that no step waits for the device, and that freed memory is not read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.cadences import cadence_for
from bench.gpu.checks import BATCH_SIZE, Single, faults_of, model, samples
from flowdp.data import open_feeds
from tests.data.poisoned import PoisonedFeed

# torch warns once per process that this mode is a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")

STEPS = 160
EAGER = flowdp.RuntimeOptions(capture=False)  # a replayed step calls no loss


@pytest.fixture
def poisonings(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> type[PoisonedFeed]:
    """Overwrite prefetched batches after their step; counts them."""
    monkeypatch.setattr(open_feeds, "PrefetchFeed", PoisonedFeed)
    monkeypatch.setattr(PoisonedFeed, "count", 0)
    return PoisonedFeed


class Watch:
    """A loss that switches torch's check for implicit waits on after the first rounds and off near the end.

    The check is per process, and raises in whichever thread waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.is_on = False
        self.device = device
        self._lock = threading.Lock()

    def switch(self, mode: str) -> None:
        self.is_on = mode == "error"
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with self._lock:
            self.steps += 1
            if self.steps == STEPS // 4:
                self.switch("error")
            elif self.steps == STEPS - 20:
                self.switch("default")
        loss = F.mse_loss(model(batch[0][:, 2:]), batch[1])
        flowdp.record_scalar("loss again", loss.detach())
        return loss


@pytest.fixture
def watch(device: torch.device) -> Iterator[Watch]:
    made = Watch(device)
    yield made
    made.switch("default")


def train(
    device: torch.device,
    loss: Any,
    *,
    is_streamed: bool,
    policy: Any,
    runtime: flowdp.RuntimeOptions = EAGER,
    **options: Any,
) -> flowdp.TrainedState:
    data = samples()
    return flowdp.Trainer(
        model(),
        lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
        loss,
        dataset=Single(data) if is_streamed else data,
        per_device_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        devices=[device] * 2,
        max_grad_norm=1.0,
        policy=policy,
        cadence=cadence_for(policy, anchor=2, max_anchor=4),
        runtime=runtime,
        progress=False,
        **options,
    ).fit()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["there", "streamed"])
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"policy": "cadence"},
        {"policy": "async"},
        {"policy": "cadence", "precision": "bf16"},
        {"policy": "sync", "runtime": flowdp.RuntimeOptions(backend="cpu", capture=False)},
    ],
    ids=str,
)
def test_nothing_on_the_step_path_waits(device, watch, options, is_streamed):
    state = train(device, watch, is_streamed=is_streamed, **options)
    assert (state.global_step, watch.is_on) == (STEPS, False)


def test_no_checkpoint_waits(device, watch, tmp_path):
    saves = flowdp.CheckpointOptions(tmp_path, every=STEPS // 3, unit="step")
    state = train(device, watch, is_streamed=False, policy="sync", checkpoint=saves)
    assert (state.global_step, watch.is_on) == (STEPS, False)
    assert list(tmp_path.glob("*.pt"))


@pytest.mark.gpu(1)
def test_the_check_bites():
    watch = Watch(torch.device("cuda", 0))

    def reading(model: nn.Module, batch: Any) -> Tensor:
        loss = watch(model, batch)
        if watch.is_on:
            loss.item()
        return loss

    try:
        with pytest.raises(flowdp.StepError, match="called a synchronizing"):
            train(watch.device, reading, is_streamed=False, policy="sync")
    finally:
        watch.switch("default")


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("stall", [None, "backward", "copy"])
def test_nothing_trains_on_a_batch_that_was_given_back(device, has_streams, poisonings, policy, stall):
    assert faults_of([device] * 2, policy=policy, stall=stall, is_streamed=True) == []
    assert bool(poisonings.count) == has_streams


def test_a_step_that_keeps_its_batch_finds_it_poisoned(device, has_streams, poisonings):
    kept: list[Tensor] = []
    spoilt: list[Tensor] = []

    def keeping(model: nn.Module, batch: Any) -> Tensor:
        spoilt.extend(old.isnan().any() for old in kept[-4:])
        kept.append(batch[0])  # not a copy
        return F.mse_loss(model(batch[0][:, 2:]), batch[1])

    train(device, keeping, is_streamed=True, policy="sync")
    assert any(spoilt) == has_streams
