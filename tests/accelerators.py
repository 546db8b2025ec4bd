"""Accelerators that this machine does not have: torch's modules for them, and streams like those of XPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.device import discovery
from tests.data.cards import Card
from tests.fakes import FakeCuda, FakeEvent

NAMES = {"cuda": "A", "xpu": "Intel(R) Data Center GPU Max 1550"}


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 2) -> Any:
    """Let torch tell of devices of a type, which flowdp finds usable; returns torch's module for them."""
    module = torch.get_device_module(kind)
    properties = SimpleNamespace(name=NAMES.get(kind, kind), total_memory=2**34, uuid="0123")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(kind))
    monkeypatch.setattr(module, "device_count", lambda: count)
    monkeypatch.setattr(module, "get_device_properties", lambda device: properties, raising=False)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(discovery, "_problem_of", lambda device: None)
    monkeypatch.setattr(discovery, "check_copies", lambda devices: None)
    if kind == "cuda":
        monkeypatch.setattr(module, "can_device_access_peer", lambda one, other: True)
    return module


class _Missing:
    """An attribute that a subclass does not have."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type) -> Any:
        raise AttributeError(self._name)


class _LikeXpu:
    """The interface of `torch.xpu`: no name for the default stream, no blocking events, no CUDA graphs."""

    default_stream = _Missing()
    CUDAGraph = _Missing()
    graph_pool_handle = _Missing()


class FakeXpu(_LikeXpu, FakeCuda):  # type: ignore[misc]
    """Stands for `torch.xpu`, on CPU tensors."""

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # type: ignore[override]
        return super().Event(enable_timing)


class XpuCard(_LikeXpu, Card):  # type: ignore[misc]
    """A `Card` with the interface of `torch.xpu`."""

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # type: ignore[override]
        return super().Event(enable_timing)


class OnXpu(Tensor):
    """A tensor on an XPU, as far as can be seen here; `recorded` are the streams that it is kept for."""

    recorded: list[Any] = []  # noqa: RUF012

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xpu", 0)

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)
