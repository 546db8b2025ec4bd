"""Tests of slots: which batches fit in which memory, and the treatment of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data.slots import Layout, is_plain, own_memory
from flowdp.device.streams import HostLane
from flowdp.device.trees import flatten
from tests.accelerators import OnXpu
from tests.data.cards import CardLane


def layout(batch: Any) -> Layout:
    return Layout.of(*flatten(batch))


def holds(full: Any, batch: Any) -> bool:
    return layout(full).holds(*flatten(batch))


FULL = {
    "x": torch.zeros(4, 3),
    "y": torch.zeros(4, dtype=torch.int64),
    "scale": torch.tensor(2.0),
    "tag": "a",
}


@pytest.mark.parametrize(
    ("change", "has_room"),
    [
        ({}, True),
        ({"tag": "b"}, True),
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2, dtype=torch.int64)}, True),
        ({"x": torch.zeros(0, 3)}, True),
        ({"x": torch.zeros(5, 3)}, False),
        ({"x": torch.zeros(4, 2)}, False),
        ({"x": torch.zeros(4, 3, 1)}, False),
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, False),
        ({"x": torch.zeros(4, 3).to_sparse()}, False),
        ({"x": [0.0]}, False),
        ({"scale": torch.zeros(1)}, False),
        ({"tag": torch.zeros(4)}, True),
        ({"more": torch.zeros(4)}, False),
    ],
)
def test_a_layout_holds_full_batches_and_shorter_ones(change, has_room):
    assert holds(FULL, {**FULL, **change}) is has_room


@pytest.mark.parametrize(
    ("leaf", "plain"),
    [
        (torch.zeros(3), True),
        (torch.zeros(3, 3).t(), True),
        (torch.zeros(1).expand(5), True),
        (torch.zeros(3, requires_grad=True), True),
        (nn.Parameter(torch.zeros(3)), False),
        (torch.zeros(3).to_sparse(), False),
        (torch.zeros(3, device="meta"), False),
        ("text", False),
        (3, False),
    ],
)
def test_only_dense_host_tensors_without_a_class_of_their_own_are_plain(leaf, plain):
    assert is_plain(leaf) is plain


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(5, 2).t(),
        torch.zeros(1).expand(6),
    ],
    ids=["channels_last", "transposed", "expanded"],
)
def test_strides_are_kept_where_they_leave_no_gaps(like):
    (memory,) = layout(like).on_device(HostLane(torch.device("cpu")))
    assert memory is not None
    assert memory.stride() == torch.empty_like(like).stride()


def test_what_moves_itself_does_so_and_the_rest_stays():
    class Moves:
        def __init__(self) -> None:
            self.where: Any = None

        def to(self, device: torch.device) -> Moves:
            self.where = device
            return self

    lane, leaf = CardLane(), Moves()
    assert own_memory(leaf, lane).where == lane.device
    assert leaf.where is None
    parameter = nn.Parameter(torch.ones(2))
    assert torch.equal(own_memory(parameter, lane), parameter)
    assert own_memory("text", lane) == "text"


def test_a_tensor_of_an_accelerator_is_awaited_and_kept_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, leaf = CardLane(), torch.rand(3).as_subclass(OnXpu)
    monkeypatch.setattr(OnXpu, "recorded", [])
    awaited: list[Any] = []
    monkeypatch.setattr(lane, "await_default", lambda stream, device: awaited.append((stream, device)))
    own_memory(leaf, lane)
    assert awaited == [(lane.copy, torch.device("xpu", 0))]
    assert OnXpu.recorded == [lane.compute]
