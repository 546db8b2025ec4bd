"""Tests of the Trainer's defaults: a script that moves to several devices gets what it had on one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flowdp
from flowdp.data.epoch_order import epoch_order

# A prefetched batch is the same as a resident one.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH, EPOCHS = 70, 16, 3
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def plain(accumulation: int = 1) -> nn.Module:
    """The loop that a user of one device would write."""
    model = net()
    optimizer = adamw(model.parameters())
    for epoch in range(EPOCHS):
        for index in epoch_order(SAMPLES, 0, epoch).split(BATCH * accumulation):
            optimizer.zero_grad()
            mse(model, (X[index], Y[index])).backward()
            optimizer.step()
    return model


def trained(devices: int, optimizer: Any = adamw, **options: Any) -> nn.Module:
    model = net()
    given: dict[str, Any] = {"dataset": (X, Y), "batch_size": BATCH, "epochs": EPOCHS} | options
    flowdp.Trainer(model, optimizer, mse, devices=["cpu"] * devices, progress=False, **given).fit()
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("devices", "reads"), [(1, "tensors"), (1, "loader"), (2, "tensors"), (3, "loader")])
def test_the_same_numbers_give_the_same_model_on_any_number_of_devices(devices: int, reads: str) -> None:
    options: dict[str, Any] = {}
    if reads == "loader":
        options = {"dataset": DataLoader(TensorDataset(X, Y), BATCH, shuffle=True), "batch_size": None}
    assert_equal(trained(devices, **options), plain())


class OneByOne(torch.optim.SGD):
    """SGD that steps parameter by parameter: it is none of torch's own, which step flat memory."""


@pytest.mark.parametrize(
    ("policy", "devices", "accumulation"),
    [("exact", 1, 2), ("exact", 2, 1), ("sync", 1, 1), ("sync", 2, 2), ("cadence", 1, 2), ("async", 1, 1)],
)
def test_gradients_of_parameters_that_no_optimizer_has_are_of_one_step(
    policy: Any, devices: int, accumulation: int
) -> None:
    """They count in the norm that is clipped, and the next step has its own."""

    def train(kind: type[torch.optim.SGD]) -> nn.Module:
        model = net()
        flowdp.Trainer(
            model, lambda model: kind(model[2].parameters(), 0.1), mse, dataset=(X, Y), batch_size=BATCH,
            gradient_accumulation_steps=accumulation, epochs=EPOCHS, devices=["cpu"] * devices,
            policy=policy, max_grad_norm=0.5, progress=False,
        ).fit()  # fmt: skip
        return model

    # No loop of one device has the mean of two models.
    is_mean = policy == "sync" and devices == 2
    assert_equal(train(OneByOne), train(torch.optim.SGD) if is_mean else plain_head(accumulation))


def plain_head(accumulation: int) -> nn.Module:
    """The loop of one device that trains the last layer alone."""
    model = net()
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)  # type: ignore[index]
    for epoch in range(EPOCHS):
        for index in epoch_order(SAMPLES, 0, epoch).split(BATCH * accumulation):
            model.zero_grad()
            mse(model, (X[index], Y[index])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


@pytest.mark.parametrize("devices", [1, 3])
def test_gradients_that_a_hook_of_the_optimizer_changes_are_those_of_the_batch(devices: int) -> None:
    def clamped(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        params = optimizer.param_groups[0]["params"]
        optimizer.register_step_pre_hook(lambda *_: [p.grad.clamp_(-0.03, 0.03) for p in params] and None)
        return optimizer

    expected = net()
    optimizer = clamped(expected.parameters())
    for epoch in range(EPOCHS):
        for index in epoch_order(SAMPLES, 0, epoch).split(BATCH):
            optimizer.zero_grad()
            mse(expected, (X[index], Y[index])).backward()
            optimizer.step()
    assert_equal(trained(devices, optimizer=clamped), expected)


@pytest.mark.parametrize(
    ("policy", "reads"),
    [("sync", "tensors"), ("sync", "loader"), ("cadence", "loader"), ("async", "tensors")],
)
def test_devices_that_average_parameters_share_the_batch(policy: Any, reads: str) -> None:
    sizes: list[int] = []
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with lock:
            sizes.append(len(batch[0]))
        return mse(model, batch)

    dataset: Any = (X, Y) if reads == "tensors" else DataLoader(TensorDataset(X, Y), BATCH, shuffle=True)
    size = BATCH if reads == "tensors" else None
    flowdp.Trainer(
        net(), adamw, loss, dataset=dataset, batch_size=size, epochs=1, devices=["cpu"] * 2, policy=policy,
        progress=False,
    ).fit()  # fmt: skip
    assert max(sizes) == BATCH // 2
    assert sum(sizes) == SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize("dataset", [Stream(), DataLoader(Stream(), BATCH)])
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_share_the_batches_of_a_stream(dataset: Any, devices: int) -> None:
    size = BATCH if isinstance(dataset, Stream) else None
    expected = net()
    optimizer = adamw(expected.parameters())
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        mse(expected, (X[start : start + BATCH], Y[start : start + BATCH])).backward()
        optimizer.step()
    assert_equal(trained(devices, dataset=dataset, batch_size=size, epochs=1), expected)


def test_a_run_goes_on_with_the_same_batches_on_another_number_of_devices(tmp_path: Any) -> None:
    """From the middle of an epoch, and back; under the policies that divide the batch it is refused."""
    model = net()
    for devices, steps in ((2, 3), (1, 7), (3, None)):
        flowdp.Trainer(
            model, adamw, mse, dataset=(X, Y), batch_size=BATCH, epochs=EPOCHS, max_steps=steps,
            devices=["cpu"] * devices, checkpoint=tmp_path, resume=True, progress=False,
        ).fit()  # fmt: skip
    assert_equal(model, plain())

    other = {"dataset": (X, Y), "batch_size": BATCH, "checkpoint": tmp_path / "sync", "policy": "sync"}
    trained(2, max_steps=2, **other)
    with pytest.raises(flowdp.CheckpointError, match="batch_size was 8, it is 6 now"):
        trained(3, resume=True, **other)
