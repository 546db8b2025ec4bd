"""Tests of every policy on cards: data trained once, falling losses, equal replicas."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu import checks
from bench.gpu.checks import BATCH_SIZE, STALLS, faults_of, model, samples
from flowdp.device import streams

POLICIES = ("sync", "cadence", "async")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["there", "streamed"])
@pytest.mark.parametrize("count", [1, 3])
def test_policies(ranks, count, is_streamed, policy):
    assert faults_of(ranks(count), policy=policy, is_streamed=is_streamed) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_through_the_memory_of_the_host(ranks, policy):
    assert faults_of(ranks(3), policy=policy, runtime=flowdp.RuntimeOptions(backend="cpu")) == []


@pytest.mark.parametrize("backend", ["local", "cpu"])
@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_late_device_changes_nothing(device, policy, stall, backend):
    assert (
        faults_of(
            [device] * 2,
            policy=policy,
            stall=stall,
            runtime=flowdp.RuntimeOptions(backend=backend),
            is_streamed=True,
        )
        == []
    )


@pytest.mark.parametrize("stall", STALLS)
def test_a_late_device_changes_nothing_under_async(device, stall):
    assert faults_of([device] * 2, policy="async", stall=stall, is_streamed=True) == []


@pytest.mark.parametrize("backend", ["nccl", "local"])
@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.gpu(2)
def test_a_late_card_changes_nothing_between_cards(stall, backend):
    assert (
        faults_of(
            ["cuda:0", "cuda:1"],
            stall=stall,
            runtime=flowdp.RuntimeOptions(backend=backend),
            is_streamed=True,
        )
        == []
    )


LATE_CYCLES = 60_000_000
"""30 ms at 2 GHz. The host of this model goes through a step and the gate in a tenth of it, and waits for the
device there only as far as the verdict on the round before."""


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("stall", "deaf", "options"),
    [
        # The mean runs while each rank is still in its step, which then falls upon it: in the last one, too.
        ("backward", "comm", {"policy": "sync"}),
        ("optimizer", "comm", {"policy": "sync"}),
        # The next step begins with what a rank has, before the mean is there.
        ("averaging", "compute", {"policy": "sync"}),
        # A step begins before its batch is there.
        ("copy", "compute", {"policy": "sync"}),
        # In a round of two steps, the second waits behind the first while a later batch comes into its slot.
        ("backward", "copy", {"policy": "cadence", "runtime": flowdp.RuntimeOptions(prefetch_depth=1)}),
    ],
    ids=["backward-comm", "optimizer-comm", "averaging-compute", "copy-compute", "backward-copy"],
)
def test_without_the_edges_between_streams_these_tests_fail(stall, deaf, options, monkeypatch):
    """Streams of one kind wait for no other, and the device is always late where they should."""
    own = torch.cuda.Stream.wait_event

    def wait_event(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if all(getattr(lane, deaf) != stream for lane in streams._made.values()):
            own(stream, event)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", wait_event)
    monkeypatch.setattr(checks, "STALL_CYCLES", LATE_CYCLES)
    monkeypatch.setattr(checks, "STALL_CHANCE", 1.0)
    try:
        found = faults_of(["cuda:0"] * 2, stall=stall, is_streamed=True, **options)
    except flowdp.FlowdpError as fault:  # memory that was not written may hold NaN
        found = [str(fault)]
    assert found != []


@pytest.mark.parametrize(("precision", "count"), [("bf16", 1), ("fp16", 2)])
def test_precisions(device, count, precision):
    assert faults_of([device] * count, precision=precision, max_grad_norm=10.0) == []


# ---------------------------------------------------------------- effects for the user
def trainer(device: torch.device, loss: Any, **options: Any) -> flowdp.Trainer:
    options = {
        "policy": "cadence",
        "epochs": 2,
        "per_device_batch_size": BATCH_SIZE,
        "dataset": samples(),
        **options,
    }
    return flowdp.Trainer(
        options.pop("model", model),
        lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
        loss,
        devices=[device] * options.pop("count", 2),
        progress=False,
        **options,
    )


def error(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0][:, 2:]), batch[1])


def test_scalars_on_the_device_arrive(device):
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        value = error(model, batch)
        flowdp.record_scalar("half", value.detach() / 2)
        return value, {"twice": value.detach() * 2, "samples": len(batch[1])}

    state = trainer(device, loss).fit()
    for record in state.history:
        assert record.scalars["twice"] == pytest.approx(2 * record.loss, rel=1e-5)
        assert record.scalars["half"] == pytest.approx(record.loss / 2, rel=1e-5)
        assert 7 < record.scalars["samples"] <= BATCH_SIZE


def test_a_failing_step_says_where(device):
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if flowdp.current_worker().local_step == 5:
            raise RuntimeError("not this batch")
        return error(model, batch)

    with pytest.raises(flowdp.StepError, match=f"on {device} failed.*not this batch"):
        trainer(device, loss).fit()
    assert trainer(device, error).fit().epochs_done == 2


def test_a_model_that_the_user_has_trained_on_the_device(device):
    """Autograd warns if a parameter's gradient is accumulated on another stream than its recorded one."""
    mine = model().to(device)
    x, y = (tensor.to(device) for tensor in samples())
    error(mine, (x, y)).backward()
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            state = trainer(device, error, model=mine, dataset=(x, y)).fit()
        finally:
            torch.set_warn_always(False)
    assert [str(warning.message) for warning in seen] == []
    assert state.history[-1].loss < state.history[0].loss
    for parameter, old in zip(mine.parameters(), before, strict=True):
        assert not torch.equal(parameter, old)  # `join` has filled the user's module
    for name, value in mine.state_dict().items():
        assert torch.equal(value.cpu(), state.state_dict[name])


@pytest.mark.parametrize("count", [1, 2])
def test_recurrent_layers_keep_their_chunk(ranks, count):
    """A cuDNN forward with weights outside one chunk warns, and warnings are errors here."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0][:, -1])

    x = torch.randn(128, 5, 4)
    run = flowdp.Trainer(
        Recurrent(),
        lambda params: torch.optim.Adam(params, lr=0.01),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        policy="cadence",
        dataset=(x, x.sum((1, 2))[:, None]),
        per_device_batch_size=8,
        epochs=3,
        devices=ranks(count),
        progress=False,
    ).start()
    first, _, last = run.metrics()
    assert last.loss < first.loss


class OnTheCard:
    """Batches that are still being computed when they are returned."""

    def __len__(self) -> int:
        return 256

    def get_batch(self, indices: list[int]) -> Tensor:
        rows = torch.tensor(indices, device="cuda", dtype=torch.float32)
        torch.cuda._sleep(2_000_000)
        return rows.add_(1)


@pytest.mark.gpu(1)
def test_what_a_dataset_makes_on_the_card_is_waited_for():
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch.clone())
        return model(batch[:, None]).mean()

    flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, lr=0.0),
        loss,
        dataset=OnTheCard(),
        batch_size=16,
        epochs=1,
        devices=["cuda:0"],
        progress=False,
    ).fit()
    assert sorted(torch.cat(seen).tolist()) == [float(index + 1) for index in range(256)]


@pytest.mark.gpu(1)
def test_what_a_dataset_makes_on_the_card_is_kept_until_an_evaluation_has_read_it():
    """The reader runs ahead on the default stream, and would get the memory of a batch that is let go of."""

    def late(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        torch.cuda._sleep(20_000_000)
        return {"mean": batch.mean()}

    run = flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, lr=0.0),
        lambda model, batch: model(batch[:, None]).mean(),
        dataset=torch.ones(16),
        batch_size=16,
        epochs=1,
        evaluation=flowdp.EvaluationOptions(OnTheCard(), step=late),
        devices=["cuda:0"],
        progress=False,
    ).start()
    run.join()
    assert run.history[0].eval["mean"] == pytest.approx(128.5)
