"""Tests of the check of the loss under policy="exact": a mean over samples, or over its named weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import StepError, current_worker
from flowdp.replica.loss_check import check_mean

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
RARE = torch.tensor([1.0, 5.0, 0.2])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def start(loss: Callable[[nn.Module, Any], Any], model: Any = None, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "model": model or net(),
        "optimizer": lambda params: torch.optim.SGD(params, 0.1),
        "loss": loss,
        "dataset": (X, Y),
        "per_device_batch_size": 6,
        "epochs": 1,
        "reading": flowdp.ReadingOptions(shuffle=False),
        "policy": "exact",
        "devices": ["cpu", "cpu"],
        "progress": False,
    }
    return flowdp.Trainer(**{**given, **options}).start()


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def by_class(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=RARE)


def named(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": by_class(model, batch), "weight": RARE[batch[1]].sum()}


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    rows = model(batch[0])
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("loss", "says"),
    [(total, "divide a sum by the samples"), (by_class, "'weight'"), (contrastive, "looks across the batch")],
)
def test_a_loss_that_counts_by_something_else_is_an_error(loss: Any, says: str, devices: int) -> None:
    with pytest.raises(StepError, match=says) as caught:
        start(loss, devices=["cpu"] * devices, batch_size=12).join()
    assert caught.value.rank == 0
    assert "FailureOptions(check_loss=False)" in str(caught.value)


@pytest.mark.parametrize("loss", [mean, named, lambda model, batch: (mean(model, batch), {})])
def test_others_train(loss: Any) -> None:
    assert start(loss).join().global_step == 1


def test_it_leaves_no_trace() -> None:
    """With and without the check a run has the same bits, statistics and records."""

    def recording(model: nn.Module, batch: Any) -> Tensor:
        loss = mean(model, batch)
        current_worker().record("value", loss.detach())
        return loss

    found = []
    for check in (True, False):
        run = start(recording, devices=["cpu"], failures=flowdp.FailureOptions(check_loss=check))
        state = run.join()
        found.append((state.state_dict, state.history[0].scalars))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name]), name


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("at", [5, 30, 63])
def test_a_label_that_is_ignored_later_is_found(at: int, devices: int) -> None:
    """In windows 1, 2, 4, 8, ..., in any micro-batch on any device."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) % 3
    labels[at] = -100

    def weighted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": mean(model, batch), "weight": (batch[1] >= 0).sum()}

    given: dict[str, Any] = {
        "dataset": (inputs, labels), "per_device_batch_size": 2, "batch_size": 8,
        "devices": ["cpu"] * devices, "model": nn.Linear(4, 3),
    }  # fmt: skip
    assert start(weighted, **given).join().global_step == 8
    run = start(mean, **given)
    with pytest.raises(StepError, match="'weight'"):
        run.join()
    # One of two devices may have trained some windows alone.
    assert max(run.status().local_steps) in (at // 8, at // 8 + 1)
    assert start(mean, **given, failures=flowdp.FailureOptions(check_loss=False)).join().global_step == 8


def test_a_loss_is_looked_at_ever_more_rarely() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(calls))
        return mean(model, batch)

    start(
        counted, per_device_batch_size=1, batch_size=2, devices=["cpu"], model=nn.Linear(4, 3), epochs=3
    ).join()
    assert len(calls) == 18 * 2 + 5 * 3  # windows 1, 2, 4, 8, 16: the loss of two samples, and of each


def test_the_rounding_of_a_small_difference_of_large_numbers_is_no_error() -> None:
    """As with a loss at the end of a run."""

    def rounded(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0]) * (1 + 2.0**-23 * len(batch[0]))  # as products of other shapes may be
        return F.mse_loss(out, batch[1])

    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 1000.0)
    x = torch.ones(6, 1)
    y = module(x).detach() + 1e-2

    def rows(start: int, stop: int) -> Any:
        return x[start:stop], y[start:stop]

    assert check_mean(module, rounded, rows, 6, x.device) == ""
    assert module.weight.item() == 1000.0
    with pytest.raises(ValueError, match="is not the mean of"):
        check_mean(module, lambda m, b: len(b[0]) * rounded(m, (b[0], b[1] + 1)), rows, 6, x.device)


def test_no_other_policy_asks() -> None:
    assert start(total, policy="sync").join().global_step == 2
