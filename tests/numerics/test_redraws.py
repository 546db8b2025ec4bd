"""Tests of dropout inside an activation checkpoint: refused wherever ranks share a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import flowdp
from flowdp.device.draws import OwnDraws, share_generator
from flowdp.errors import FlowdpError

X, Y = torch.rand(16, 4), torch.rand(16, 1)
CPU = torch.device("cpu")
# The generators of ranks are those of the host on fake streams, too.
pytestmark = pytest.mark.parametrize("lanes", ["cpu"], indirect=True)

MATCH = "draws random numbers in a forward that a backward computes again"


class Net(nn.Module):
    """Two layers; the first, with its dropout, is computed again in the backward."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.part, x, use_reentrant=False))

    def part(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), self.rate, self.training)


class Plain(Net):
    """The same without a second forward."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.part(x))


def error(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = F.mse_loss(model(batch[0]), batch[1])
    return loss


def own_step(worker: Any, batch: Any) -> None:
    worker.backward(error(worker.model, batch))
    worker.step(worker.optimizers[0])


def sharded(model: nn.Module, devices: int) -> None:
    with flowdp.setup(model, SGD(model.parameters(), 0.1), devices=["cpu"] * devices, progress=False) as dp:
        for _ in range(3):
            F.mse_loss(dp(X), Y).backward()
            dp.step()


def in_windows(model: nn.Module, devices: int) -> None:
    with flowdp.setup(
        model,
        SGD(model.parameters(), 0.1),
        devices=["cpu"] * devices,
        progress=False,
        cadence=True,
        loss_fn=lambda context: F.mse_loss(context.output, context.batch[1]),
        inputs=0,
    ) as dp:
        for window in dp.epoch([(X, Y)] * 4):
            dp.forward_batch(window)
            dp.step()


def trainer(**options: Any) -> Callable[[nn.Module, int], None]:
    def run(model: nn.Module, devices: int) -> None:
        given: dict[str, Any] = {"loss": error} | options
        flowdp.Trainer(
            model=model,
            optimizer=lambda parameters: SGD(parameters, 0.1),
            dataset=(X, Y),
            per_device_batch_size=4,
            epochs=1,
            devices=["cpu"] * devices,
            progress=False,
            **given,
        ).fit()

    return run


DOORS = {
    "setup": sharded,
    "windows": in_windows,
    "cadence": trainer(policy="cadence"),
    "fp16": trainer(policy="sync", precision="fp16"),
    "exact": trainer(policy="exact"),
    "a step of one's own": trainer(policy="sync", loss=None, train_step=own_step),
}


@pytest.mark.parametrize("door", DOORS)
def test_ranks_that_share_a_generator_draw_nothing_again(door: str) -> None:
    with pytest.raises(FlowdpError) as caught:
        DOORS[door](Net(), 2)
    assert MATCH in str(caught.value)


@pytest.mark.parametrize("door", ["windows", "cadence", "exact"])
@pytest.mark.parametrize(("net", "devices"), [(Net(), 1), (Net(0.0), 2), (Plain(), 2)])
def test_what_repeats_or_is_not_repeated_is_trained(door: str, net: nn.Module, devices: int) -> None:
    DOORS[door](net, devices)
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_noise_on_gradients_is_none_of_its_business() -> None:
    net = Plain()
    net.head.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    own = torch.Generator().manual_seed(0)
    net.inner.weight.register_hook(lambda gradient: gradient + torch.rand(8, 4, generator=own))
    with OwnDraws():
        net(X).sum().backward()
    assert net.head.weight.grad is not None


def test_which_ranks_share_a_generator() -> None:
    names = ["cpu", "cuda:0", "cuda:1", "cpu:0", "cuda:0"]
    assert share_generator([torch.device(name) for name in names]) == [True, True, False, True, True]
    assert share_generator([CPU]) == [False]
