"""Tests of captured steps on a card, against eager ones; on the CPU the same tests with its own graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.checks import BATCH_SIZE, Single, samples

STEPS = 120


def model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1)
    )


def mse(module: nn.Module, batch: Any) -> Any:
    loss = F.mse_loss(module(batch[0][:, 2:]), batch[1])
    return loss, {"twice": 2 * loss}


def train(
    device: torch.device,
    ranks: int = 1,
    dropout: float = 0.0,
    *,
    loss: Any = mse,
    capture: bool = False,
    ratios: tuple[float, float] | None = None,
    **options: Any,
) -> flowdp.TrainedState:
    torch.manual_seed(1)
    return flowdp.Trainer(
        model(dropout),
        lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        loss,
        dataset=Single(samples(400)),
        per_device_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        devices=[device] * ranks,
        seed=2,
        progress=False,
        runtime=flowdp.RuntimeOptions(capture=capture, partition_ratios=ratios),
        **{"policy": "sync", **options},
    ).fit()


def same(one: flowdp.TrainedState, other: flowdp.TrainedState) -> bool:
    return all(torch.equal(tensor, other.state_dict[name]) for name, tensor in one.state_dict.items())


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """flowdp's messages about captures."""
    caplog.set_level(logging.WARNING, "flowdp")
    return lambda: [text for text in caplog.messages if text.startswith("capture")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout": 0.5},
        {"ranks": 2},
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 2},
        {"policy": "exact", "ranks": 2, "ratios": (0.5, 0.5)},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_captured_steps_are_the_eager_ones(device, told, options):
    captured, eager = (train(device, capture=capture, **options) for capture in (True, False))
    assert same(captured, eager)
    assert told() == []


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_other_policies_train_with_graphs(device, told, policy):
    state = train(device, 2, policy=policy, capture=True)
    assert state.global_step == STEPS
    assert state.history[-1].loss < state.history[0].loss
    assert told() == []


def reads(module: nn.Module, batch: Any) -> Tensor:
    loss, _ = mse(module, batch)
    return loss if loss.item() < 1e9 else 2 * loss


def test_a_loss_that_reads_a_value_stays_eager_and_says_so_once(device, told):
    assert same(
        train(device, 2, loss=reads, capture=True),
        train(device, 2, loss=reads),
    )
    assert len(told()) == 1
    assert same(train(device, capture=True), train(device))  # nothing is left of the attempt


@pytest.mark.gpu(1)
def test_a_run_that_is_over_gives_its_graphs_memory_back():
    device = torch.device("cuda", 0)
    train(device, capture=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    for _ in range(3):
        train(device, capture=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(device) <= before
    assert not torch.cuda.is_current_stream_capturing()
