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


# ---------------------------------------------------------------- a loop of the user's own
def loop(
    device: torch.device,
    *,
    capture: Any = False,
    dropout: float = 0.0,
    accumulate: int = 1,
    scales: bool = False,
    casts: bool = False,
    keeps: bool = False,
) -> tuple[dict[str, Tensor], str]:
    """State of a model behind a loop with `setup`, and the text of `dp`."""
    torch.manual_seed(1)
    module = model(dropout).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    x, y = (part.to(device) for part in samples(400))
    with flowdp.setup(module, optimizer, devices=[device], capture=capture, progress=False) as dp:
        kept = []
        for number in range(STEPS):
            at = number * BATCH_SIZE % 384
            rows = slice(at, at + BATCH_SIZE)
            with torch.autocast(device.type, torch.bfloat16, enabled=casts):
                loss = F.mse_loss(dp(x[rows, 2:].contiguous()).float(), y[rows]) / accumulate
            scaler.scale(loss).backward()
            if keeps:  # a graph of the loop's that is alive when a call is captured
                kept.append(loss)
            if number % accumulate == accumulate - 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(dp.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        text = repr(dp)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}, text


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout": 0.5}, {"accumulate": 3}, {"scales": True}, {"casts": True}, {"keeps": True}],
    ids=str,
)
def test_a_loop_with_captured_calls_is_the_eager_one(device, has_streams, told, options):
    if device.type == "cpu" and options.get("scales"):
        pytest.skip("a scaler is for cards")
    captured, text = loop(device, capture=has_streams or "auto", **options)
    eager, _ = loop(device, **options)
    assert all(torch.equal(tensor, captured[name]) for name, tensor in eager.items())
    assert ("calls are captured" in text) == has_streams
    assert told() == []


@pytest.mark.gpu(1)
def test_a_loop_finds_by_itself_whether_its_calls_are_captured():
    device = torch.device("cuda", 0)
    captured, _ = loop(device, capture="auto")
    eager, _ = loop(device)
    assert all(torch.equal(tensor, captured[name]) for name, tensor in eager.items())


@pytest.mark.gpu(1)
def test_two_calls_before_a_backward_and_outputs_without_gradients_on_a_card(told):
    device = torch.device("cuda", 0)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.trunk(x).tanh()
            return {"one": self.one(hidden), "other": self.other(hidden), "best": hidden.argmax(1)}

    def train(capture: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = Heads().to(device)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        x = samples(400)[0].to(device)
        with flowdp.setup(module, optimizer, devices=[device], capture=capture, progress=False) as dp:
            for number in range(40):
                loss = dp(x[:16, 2:].contiguous())["one"].square().mean()
                if number % 3 == 2:
                    loss = loss + dp(x[16:32, 2:].contiguous())["other"].square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in module.parameters()]

    assert all(map(torch.equal, train(True), train(False)))
    assert told() == []


@pytest.mark.gpu(1)
def test_a_second_backward_of_a_captured_call_behind_a_later_one_is_an_error():
    device = torch.device("cuda", 0)
    module = model(0.0).to(device)
    with flowdp.setup(module, devices=[device], capture=True, progress=False) as dp:
        dp.train()
        x = samples(16)[0][:, 2:].to(device)
        for _ in range(10):
            output = dp(x)
            output.sum().backward()
        output = dp(x)
        output.sum().backward()
        dp(x)  # writes over the memory of the call before
        with pytest.raises(RuntimeError, match="a second time"):
            output.sum().backward()
        torch.cuda.synchronize()
