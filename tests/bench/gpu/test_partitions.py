"""Tests of parts of a card with a stand-in for the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from bench.gpu import partitions
from bench.gpu.partitions import COUNT_OFFSET, PartitionedModule, by_driver, lanes_on
from flowdp.device.streams import StreamLane
from tests.fakes import FakeCuda

CPU = torch.device("cpu")


class Library:
    """Stands for libcuda on a card of 132 multiprocessors.

    Args:
        granted: Groups that a split gives.
    """

    def __init__(self, granted: int = 1) -> None:
        self.granted = granted
        self.made: list[tuple[int, int]] = []
        self.counts: dict[int, int] = {}

    @staticmethod
    def _put(resource: Any, count: int) -> None:
        ctypes.c_uint.from_buffer(resource._obj, COUNT_OFFSET).value = count

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index + 7
        return 0

    def cuDeviceGetDevResource(self, _device: Any, whole: Any, _kind: int) -> int:
        self._put(whole, 132)
        return 0

    def cuDevSmResourceSplitByCount(
        self, part: Any, groups: Any, whole: Any, rest: Any, _flags: Any, least: Any
    ) -> int:
        groups._obj.value = self.granted
        count = -(-least.value // 8) * 8
        self._put(part, count)
        self._put(rest, partitions.count_of(whole._obj) - count)
        return 0

    def cuDevResourceGenerateDesc(self, description: Any, resource: Any, _count: Any) -> int:
        description._obj.value = partitions.count_of(resource._obj)
        return 0

    def cuGreenCtxCreate(self, context: Any, description: Any, _device: int, _flags: Any) -> int:
        context._obj.value = 1000 + description.value
        return 0

    def cuGreenCtxStreamCreate(self, stream: Any, context: Any, _flags: Any, priority: int) -> int:
        self.made.append((context.value, priority))
        stream._obj.value = len(self.made)
        return 0


def test_the_driver_gives_a_part_and_the_rest() -> None:
    parts = by_driver(CPU, (84, 40), Library())
    assert [part.multiprocessors for part in parts] == [88, 44]


def test_all_streams_of_a_lane_belong_to_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    library, cuda = Library(), FakeCuda()
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    lanes = lanes_on(CPU, by_driver(CPU, (88, 40), library), cuda)
    lanes[0].aside(1)
    assert isinstance(lanes[0], StreamLane)
    assert isinstance(lanes[0].device_module, PartitionedModule)
    assert [context for context, _ in library.made] == [1088] * 3 + [1044] * 3 + [1088]
    assert [priority for _, priority in library.made] == [0, -1, 0, 0, -1, 0, -1]
    assert lanes[1].compute == (4, 0)
    assert lanes[1].event().cuda is cuda  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_streams", [True, False])
def test_torch_makes_parts_if_it_hands_out_streams(
    monkeypatch: pytest.MonkeyPatch, has_streams: bool
) -> None:
    green = pytest.importorskip("torch.cuda.green_contexts")

    class Context:
        def __init__(self, multiprocessors: int) -> None:
            self.multiprocessors = multiprocessors
            if has_streams:
                self.Stream = lambda: f"a stream of {multiprocessors}"

    monkeypatch.setattr(green.GreenContext, "create", lambda num_sms, device_id: Context(num_sms))
    if has_streams:
        first, second = partitions.by_torch(CPU, (88, 40))
        assert [first.stream(0), second.stream(-1)] == ["a stream of 88", "a stream of 40"]
    else:
        with pytest.raises(RuntimeError, match="has no stream"):
            partitions.by_torch(CPU, (88, 40))
