"""Tests of leaves on their way to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data.moving import is_plain, own_memory
from tests.accelerators import OnXpu
from tests.data.cards import CardLane


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
