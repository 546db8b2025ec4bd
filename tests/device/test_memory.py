"""Tests of the memory gauge: values of torch and the driver, under torch's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowdp.device.memory import empty_cache, read_memory, reset_peak
from flowdp.device.streams import HostLane, StreamLane
from flowdp.policy.budget import Memory
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
