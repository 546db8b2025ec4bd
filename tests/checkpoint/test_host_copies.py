"""Tests of copies to host memory through pinned blocks: every bit, one limit, no early reading."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.checkpoint.host_copies import HostCopies, PinnedBlocks
from flowdp.device.streams import Event, StreamLane
from tests.fakes import FakeCuda

CPU = torch.device("cpu")


class Held(threading.Event):
    """The device's arrival at an event.

    Attributes:
        is_awaited: Set once a host waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


class Lent(StreamLane):
    """A card on the CPU with watched pinned memory.

    Attributes:
        sizes: Bytes of the pinned blocks.
        held: Set it to let the device pass its events.
    """

    def __init__(self) -> None:
        super().__init__(CPU, FakeCuda())
        self.sizes: list[int] = []
        self.held = Held()
        self.held.set()

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        host = super().pinned(shape, dtype)
        self.device_module.watch("a block", host)
        self.sizes.append(host.nbytes)
        return host

    def event(self, *, timing: bool = False) -> Event:
        event = super().event(timing=timing)
        event.passed = self.held  # type: ignore[attr-defined]
        return event


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(300),
        torch.randn(7, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(10, 6)[:, ::2],
        torch.randn(5).expand(4, 5),
        torch.tensor(3.0),
        torch.randint(9, (3,), dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.randn(9, dtype=torch.complex128).conj(),
        torch.randn(5).to(torch.bfloat16),
        torch.empty(0, 3),
    ]


def copy(lane: Lent, blocks: PinnedBlocks, given: list[Tensor]) -> HostCopies:
    with lane.on(lane.compute):
        return HostCopies(blocks, given)


@pytest.mark.parametrize("limit", [64, 1000, 1 << 20])
def test_every_bit_arrives_whatever_the_block(limit: int) -> None:
    lane, given = Lent(), tensors()
    blocks = PinnedBlocks(lane, limit)
    for _ in range(2):
        copies = copy(lane, blocks, given)
        copies.wait()
        for one, other in zip(given, copies.tensors, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert other.untyped_storage().nbytes() == other.nbytes
            assert other.stride() == torch.empty_like(one).stride()
    assert len(lane.sizes) == 1  # the block is used again
    assert lane.sizes[0] <= limit
    assert lane.device_module.races == []


def test_the_host_does_not_wait_before_it_asks_for_the_copies() -> None:
    lane, given = Lent(), [torch.arange(64.0) for _ in range(4)]
    lane.held.clear()
    copies = copy(lane, PinnedBlocks(lane), given)
    assert not lane.held.is_awaited.is_set()
    lane.held.set()
    copies.wait()
    assert lane.held.is_awaited.is_set()


def test_what_is_read_before_the_device_is_there_is_a_race() -> None:
    lane, given = Lent(), [torch.arange(64.0)]
    copies = copy(lane, PinnedBlocks(lane), given)
    with lane.on(lane.copy):
        copies._moves[0][1] + 0
    assert lane.device_module.races
