"""Devices of the GPU tests: CUDA, and the CPU with the same tests, so that they stay correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import pytest
import torch

from flowdp.data_parallel import wrapper
from flowdp.device.streams import StreamLane
from flowdp.policy.worth import LaunchWatch
from flowdp.replica import build

Ranks = Callable[[int], Sequence[torch.device]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: comes last where the time on a GPU is limited (bench.gpu.suite)"
    )


@pytest.fixture(params=[pytest.param("cuda:0", marks=pytest.mark.gpu(1)), "streams", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A card; the CPU with fake streams; the CPU."""
    if request.param == "streams":
        fake_streams(monkeypatch)
    return torch.device("cpu" if request.param == "streams" else request.param)


@pytest.fixture
def has_streams(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Whether `device` works like a card: prefetches, keeps data resident, runs behind its host."""
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture(
    params=[
        pytest.param(["cuda:0"], marks=pytest.mark.gpu(1)),
        pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.gpu(2)),
        pytest.param(["cuda:0", "cpu"], marks=pytest.mark.gpu(1)),
        "streams",
        ["cpu"],
    ],
    ids=["card", "cards", "card-and-cpu", "streams", "cpu"],
)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """`ranks(n)`: n devices, the machine's in turn."""
    there = request.param
    if there == "streams":
        fake_streams(monkeypatch)
        there = ["cpu"]
    return lambda count: list(islice(cycle(map(torch.device, there)), count))


def fake_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs on the CPU behave as on a card."""
    from tests.data.cards import Card

    card = Card()

    def open_lanes(devices: Sequence[torch.device]) -> list[StreamLane]:
        return [StreamLane(device, card) for device in devices]

    # Times of fake streams are those of the host, so whether steps are captured would be a matter of chance.
    monkeypatch.setattr(LaunchWatch, "take", lambda watch, launch_ms, device_ms: None)
    for door in (build, wrapper):
        monkeypatch.setattr(door, "open_lanes", open_lanes)
