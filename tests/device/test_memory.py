"""Tests of the memory gauge: values of torch and the driver, under torch's names."""

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
from flowdp.device.memory import empty_cache, keep_memory, read_memory, reset_peak
from flowdp.device.streams import HostLane, StreamLane
from flowdp.policy.budget import Memory
from flowdp.replica import build, inference
from tests.data.cards import Card, put_on_streams
from tests.fakes import FakeCuda


class Cuda(FakeCuda):
    def __init__(self, stats: dict[str, int]) -> None:
        super().__init__()
        self.stats = stats
        self.asked: list[Any] = []

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        self.asked.append(device)
        return 70, 100  # free, total; in the other order, flodl had empty rings on empty devices

    def memory_stats(self, device: Any) -> dict[str, int]:
        self.asked.append(device)
        return self.stats

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.asked.append(device)


DEVICE = torch.device("cuda", 1)


def test_all_numbers_have_their_place():
    cuda = Cuda(
        {
            "reserved_bytes.all.current": 20,
            "reserved_bytes.all.peak": 99,
            "active_bytes.all.current": 11,
            "active_bytes.all.peak": 15,
            "inactive_split_bytes.all.current": 3,
        }
    )
    found = read_memory(StreamLane(DEVICE, cuda))
    assert found == Memory(total=100, free=70, reserved=20, active=11, peak=15, split=3)
    assert set(cuda.asked) == {DEVICE}


def test_the_peak_begins_anew_on_the_device_of_the_lane():
    cuda = Cuda({})
    reset_peak(StreamLane(DEVICE, cuda))
    assert cuda.asked == [DEVICE]


def test_a_cpu_device_has_no_gauge():
    lane = HostLane(torch.device("cpu"))
    assert read_memory(lane) is None
    reset_peak(lane)
    empty_cache(lane)


@pytest.mark.gpu(1)
def test_torch_has_all_these_names():
    lane = StreamLane(torch.device("cuda", 0))
    reset_peak(lane)
    kept = torch.empty(3 << 20, dtype=torch.uint8, device=lane.device)
    del kept
    found = read_memory(lane)
    assert found is not None
    assert found.peak >= 3 << 20
    assert found.total > found.free > 0
    assert found.reserved >= found.active
    stats = torch.cuda.memory_stats(lane.device)
    for name in ("reserved_bytes", "active_bytes", "inactive_split_bytes"):
        assert f"{name}.all.current" in stats


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
