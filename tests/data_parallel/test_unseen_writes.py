"""Tests of writes that do not change a tensor's version: found by a checksum of its bits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowdp.data_parallel.unseen_writes import EACH, FIRST, LATE, UnseenWrites
from flowdp.device.streams import StreamLane
from flowdp.errors import FlowdpError
from tests.fakes import FakeCuda, FakeEvent
from tests.loops import CPU

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.complex128, torch.bool, torch.uint8, torch.int64]


def states(tensors: list[Tensor]) -> list[tuple[Tensor, float]]:
    return [(tensor, tensor._version) for tensor in tensors]


def test_the_first_calls_find_each_write_at_once() -> None:
    for dtype in DTYPES:
        tensors = [torch.zeros(3, 4, dtype=dtype).t(), torch.zeros(0)]
        unseen = UnseenWrites(StreamLane(CPU, FakeCuda()))
        for _ in range(FIRST - 1):
            assert not unseen.look(states(tensors))
        tensors[0].data[1, 1] = 1
        assert unseen.look(states(tensors)), dtype
        assert unseen.is_found
        assert unseen.look(states(tensors)), "from now on everything is sent"


def test_a_write_that_counts_is_none() -> None:
    tensors = [torch.zeros(3) for _ in range(9)]
    unseen = UnseenWrites(StreamLane(CPU, FakeCuda()))
    for turn in range(3 * FIRST):
        tensors[2 + turn % 7].add_(1)
        tensors[0] = torch.full((3,), float(turn))
        with torch.inference_mode():
            tensors[1] = torch.full((3,), float(turn))
        now = [(t, float("nan") if t.is_inference() else t._version) for t in tensors]
        assert not unseen.look(now)


@pytest.mark.parametrize("place", range(9))
def test_a_late_write_is_found_within_so_many_calls(place: int) -> None:
    tensors = [torch.zeros(3) for _ in range(9)]
    unseen = UnseenWrites(StreamLane(CPU, FakeCuda()))
    for _ in range(FIRST + 3):
        assert not unseen.look(states(tensors))
    tensors[place].data.add_(1)
    assert calls_until_it_raises(lambda: unseen.look(states(tensors))) <= -(-9 // EACH) + LATE
    assert not unseen.look(states(tensors))


def test_the_host_waits_for_no_answer_that_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(3)]
    unseen = UnseenWrites(StreamLane(CPU, FakeCuda()))
    for _ in range(FIRST + 1):
        unseen.look(states(tensors))
    waits: list[int] = []
    monkeypatch.setattr(FakeEvent, "passed", threading.Event())  # the device is late
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: waits.append(1))
    tensors[0].data.add_(1)
    unseen.forget()
    unseen.look(states(tensors))
    unseen.look(states(tensors))
    tensors[0].data.add_(1)
    unseen.look(states(tensors))  # asks
    for _ in range(LATE - 1):
        unseen.look(states(tensors))
        assert waits == []
    with pytest.raises(FlowdpError, match="older values"):
        unseen.look(states(tensors))
    assert waits == [1]


def calls_until_it_raises(call: Callable[[], object]) -> int:
    for count in range(50):
        try:
            call()
        except FlowdpError:
            return count
    raise AssertionError("it was not found")
