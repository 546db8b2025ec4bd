"""Tests of batches of any form on their way to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.data.staging import HOST_SLOTS, Staging
from tests.data.cards import CardLane


def leaves(number: int) -> list[Any]:
    """A batch whose form depends on its number."""
    rows = number % 5 + 1
    return [
        torch.full((rows, 3), float(number)),
        torch.full((3, rows), number).t(),
        torch.full((rows, 2, 2, 2), number, dtype=torch.uint8).to(memory_format=torch.channels_last),
        torch.tensor(number),
        torch.zeros(0, 4),
        torch.full((1,), float(number)).expand(rows),
        f"text {number}",
        number,
    ]


def same(made: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(made, wanted, strict=True):
        if isinstance(other, Tensor):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
            assert one.stride() == torch.empty_like(other).stride()
            assert one.data_ptr() != other.data_ptr() or not other.numel()
        else:
            assert one == other


@pytest.mark.parametrize("order", [range(12), reversed(range(12))], ids=["growing", "shrinking"])
def test_every_batch_arrives_in_memory_of_its_own(order):
    lane = CardLane()
    staging, made = Staging(lane), {}
    for number in order:
        with lane.on(lane.copy):
            made[number] = staging.bring(leaves(number))
        mark = lane.event()
        mark.record(lane.copy)
        with lane.on(lane.compute):
            lane.compute.wait_event(mark)
            for leaf in made[number]:
                if isinstance(leaf, Tensor):
                    leaf + 0
    for number, batch in made.items():
        same(batch, leaves(number))
    assert lane.card.races == []


def test_a_buffer_is_not_written_before_the_copies_out_of_it():
    lane = CardLane()
    staging = Staging(lane)
    with lane.on(lane.copy):
        for number in range(HOST_SLOTS):
            staging.bring(leaves(number))
        lane.card.deaf.update(lane.made)
        staging.bring(leaves(0))
    assert any("pinned memory" in race for race in lane.card.races)


class Counting(CardLane):
    pins = 0

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.pins += 1
        return super().pinned(shape, dtype)


def test_what_the_loader_has_pinned_is_copied_from_there_and_kept_until_it_is():
    lane = Counting()
    staging = Staging(lane)
    leaf = torch.arange(4.0)
    leaf.is_pinned = lambda *_: True  # type: ignore[method-assign]
    with lane.on(lane.copy):
        [moved] = staging.bring([leaf])
    assert torch.equal(moved, leaf)
    assert staging._buffers[-1].kept == [leaf]
    assert lane.pins == 0


def test_a_leaf_with_a_graph_keeps_it():
    lane = CardLane()
    leaf = torch.ones(3, requires_grad=True)
    with lane.on(lane.copy):
        [moved] = Staging(lane).bring([leaf])
    moved.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3))
