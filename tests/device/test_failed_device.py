"""Tests of a device that has failed: memory, events and graphs stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flowdp
from flowdp.data_parallel import wrapper
from flowdp.device.failed_device import keep_memory
from flowdp.device.streams import HostLane, StreamLane
from flowdp.replica import build, inference
from tests.data.cards import Card, put_on_streams
from tests.fakes import FakeCuda

CPU = torch.device("cpu")
ASSERT = "CUDA error: device-side assert triggered"


class Objecting:
    """An object that cannot be asked for its class."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("the user's code was called")


@pytest.mark.parametrize("has_failed", [True, False])
def test_tensors_stay_if_a_device_has_failed(monkeypatch: pytest.MonkeyPatch, has_failed: bool) -> None:
    sound, card = StreamLane(CPU, FakeCuda()), FakeCuda()
    card.failure = RuntimeError(ASSERT) if has_failed else None
    tensors = [torch.ones(2), nn.Parameter(torch.ones(2))]
    kept = [weakref.ref(tensor) for tensor in tensors]
    # Not those of other tests.
    monkeypatch.setattr(gc, "get_objects", lambda: [Objecting(), *tensors])
    keep_memory([HostLane(CPU), sound, StreamLane(CPU, card)])
    monkeypatch.undo()
    tensors.clear()
    assert [ref() is not None for ref in kept] == [has_failed] * 2


Door = Callable[[Callable[[nn.Module, Tensor], Tensor]], object]


def trainer(loss: Callable[[nn.Module, Tensor], Tensor]) -> flowdp.Trainer:
    return flowdp.Trainer(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        loss,
        dataset=torch.ones(64, 2),
        per_device_batch_size=4,
        epochs=1,
        devices=["cpu"] * 2,
        progress=False,
    )


def train(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    trainer(loss).fit()


def predict(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    trainer(step).predict(torch.ones(64, 2), step)


def loop(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = nn.Linear(2, 1)
    dp = flowdp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=["cpu"] * 2)
    with dp:
        for window in dp.epoch(DataLoader(torch.ones(64, 2), batch_size=4)):  # type: ignore[arg-type]
            loss(model, window.pieces[0].batch)


@pytest.mark.parametrize("door", [train, predict, loop])
@pytest.mark.parametrize("has_failed", [True, False])
def test_what_a_failed_run_had_stays(monkeypatch: pytest.MonkeyPatch, door: Door, has_failed: bool) -> None:
    card = Card()
    put_on_streams(card, monkeypatch.setattr)
    for module in (inference, wrapper):
        monkeypatch.setattr(module, "open_lanes", build.open_lanes)
    seen: list[weakref.ref[Tensor]] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if has_failed:
            card.failure = RuntimeError(ASSERT)
        seen.append(weakref.ref(batch))
        raise RuntimeError(ASSERT)

    with pytest.raises((flowdp.FlowdpError, RuntimeError), match="device-side assert"):
        door(loss)
    monkeypatch.undo()
    gc.collect()
    assert any(ref() is not None for ref in seen) == has_failed
