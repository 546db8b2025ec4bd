"""Tests of the sampler."""

from __future__ import annotations

import math
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flowdp.timeline.sampler import GpuReading, GpuSensor, Sampler
from tests.limits import HANG_S


class Nvml:
    """NVML with one device, by its UUID."""

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != b"GPU-7":
            raise RuntimeError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3)


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert GpuSensor("GPU-7").read() == GpuReading(0.4, 3.0)
    assert math.isnan(GpuSensor("GPU-8").read().utilisation)


def test_without_nvml_the_use_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = GpuSensor("GPU-7").read()
    assert math.isnan(reading.utilisation)
    assert math.isnan(reading.memory_bytes)


def test_it_samples_until_it_is_closed_and_once_more() -> None:
    taken: list[tuple[float, float]] = []
    has_two = threading.Event()

    def take(cores: float, ram_bytes: float, gpus: Any) -> None:
        taken.append((cores, ram_bytes))
        if len(taken) == 2:
            has_two.set()

    sampler = Sampler(take, every_s=0.001)
    sampler.start()
    assert has_two.wait(HANG_S)
    sampler.close()
    count = len(taken)
    assert count >= 3
    assert all(0.0 <= cores < 256.0 and not ram_bytes < 1e7 for cores, ram_bytes in taken)
    assert not [thread for thread in threading.enumerate() if thread.name == "flowdp-sampler"]


def test_one_that_was_not_started_is_closed() -> None:
    Sampler(lambda *_: None).close()
