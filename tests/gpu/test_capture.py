"""Tests of captured steps on a card, against eager ones."""

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
RATE = 2**-10
"""A learning rate that is the same number in float32, as it lies on the card."""


@pytest.fixture(autouse=True)
def _no_plain_cpu(request: pytest.FixtureRequest) -> None:
    """Skip tests on the CPU without fake streams: nothing is captured there."""
    if "device" in request.fixturenames and request.node.callspec.params["device"] == "cpu":
        pytest.skip("captured steps need a CUDA device, or a fake one")


def model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1)
    )


def mse(module: nn.Module, batch: Any) -> Any:
    loss = F.mse_loss(module(batch[0][:, 2:]), batch[1])
    return loss, {"twice": 2 * loss}


def train(device: torch.device, ranks: int = 1, dropout: float = 0.0, **options: Any) -> flowdp.TrainedState:
    return trainer(device, ranks, dropout, **options).fit()


def trainer(
    device: torch.device,
    ranks: int = 1,
    dropout: float = 0.0,
    *,
    loss: Any = mse,
    capture: Any = False,
    compiled: bool = False,
    ratios: tuple[float, float] | None = None,
    **options: Any,
) -> flowdp.Trainer:
    torch.manual_seed(1)
    module = model(dropout)
    if compiled:
        module.compile()
    return flowdp.Trainer(
        module,
        lambda params: torch.optim.AdamW(params, lr=RATE, fused=True),
        loss,
        dataset=Single(samples(400)),
        per_device_batch_size=BATCH_SIZE,
        devices=[device] * ranks,
        seed=2,
        progress=False,
        runtime=flowdp.RuntimeOptions(capture=capture, partition_ratios=ratios),
        **{"policy": "sync", "max_steps": STEPS, **options},
    )


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
        {"callbacks": [flowdp.EMA(0.99)]},
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


@pytest.mark.gpu(1)
def test_captured_steps_of_a_compiled_model_are_the_eager_ones(told):
    device = torch.device("cuda", 0)
    captured, eager = (train(device, capture=capture, compiled=True) for capture in (True, False))
    assert same(captured, eager)
    assert told() == []


@pytest.mark.gpu(1)
def test_steps_of_small_kernels_are_captured_by_themselves():
    run = trainer(torch.device("cuda", 0), capture="auto", max_steps=300).start()
    run.join()
    assert run.status().capture == ("captured",)
    assert "1 of 1 with captured steps" in run.report().headline


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
