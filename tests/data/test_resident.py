"""Tests of datasets on the device: the right samples, copies of indices only, no wait of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.data.epoch_order import EpochOrder, SamplerOrder
from flowdp.data.resident import ResidentData, ResidentFeed
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import HostLane, Lane
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange
from tests.data.cards import Card, CardLane

LENGTH, BATCH, BATCHES = 23, 5, 5
X, Y = torch.rand(LENGTH, 3), torch.arange(LENGTH)


def source(order: Any = None, *tensors: Tensor) -> TensorSource:
    order = order or EpochOrder(LENGTH, BATCH, 7, shuffle=True, drop_last=False)
    return TensorSource(tensors or (X, Y), tuple, order)


def on_card(made: TensorSource) -> tuple[ResidentFeed, CardLane]:
    lane = CardLane()
    return ResidentFeed(ResidentData(made, lane), 0, lane), lane


def take(feed: ResidentFeed, lane: Lane, epoch: int, batch: int) -> Any:
    with lane.on(lane.compute):
        parts = feed.take(epoch, batch).batch
        feed.release()
    return parts


def check(made: TensorSource, feed: ResidentFeed, lane: Lane, epoch: int, batch: int) -> None:
    parts, index = take(feed, lane, epoch, batch), made.index(epoch, batch)
    assert torch.equal(parts[0], X[index])
    assert torch.equal(parts[1], Y[index])


@pytest.mark.parametrize("lane_of", [CardLane, lambda: HostLane(torch.device("cpu"))], ids=["card", "host"])
def test_all_batches_of_all_epochs(lane_of):
    made, lane = source(), lane_of()
    feed = ResidentFeed(ResidentData(made, lane), 0, lane)
    feed.start(lambda epoch, batch: pytest.fail("no thread waits"))
    for epoch in range(5):
        for batch in range(BATCHES):
            check(made, feed, lane, epoch, batch)
    if isinstance(lane, CardLane):
        assert lane.card.races == []
    assert feed.close()


def test_a_batch_waits_for_the_copies_of_the_dataset():
    made, lane = source(), CardLane()
    lane.card.deaf.add(lane.compute)
    feed = ResidentFeed(ResidentData(made, lane), 0, lane)
    take(feed, lane, 0, 0)
    assert any("copy_" in race for race in lane.card.races)


def test_the_order_is_uploaded_once_an_epoch_and_two_are_kept():
    feed, lane = on_card(source())
    take(feed, lane, 0, 0)
    take(feed, lane, 1, 0)
    made, bytes_ = list(map(id, feed._orders)), lane.card.allocated
    for batch in range(BATCHES):  # a rank may be in two epochs at once
        take(feed, lane, 0, batch)
        take(feed, lane, 1, batch)
    assert list(map(id, feed._orders)) == made
    take(feed, lane, 2, 0)
    take(feed, lane, 3, 0)
    assert [order.epoch for order in feed._orders if order] == [2, 3]
    assert lane.card.allocated == bytes_, "the memory of older orders was to be used again"


def test_tensors_that_lie_there_are_used_as_they_are():
    lane = HostLane(torch.device("cpu"))
    assert ResidentData(source(), lane).tensors[0] is X
    assert ResidentData(source(), CardLane()).tensors[0] is not X


def test_what_the_user_made_there_is_waited_for():
    card = Card()
    x, user = torch.zeros(LENGTH, 2), card.Stream()
    card.watch("the user's tensor", x)
    lane = CardLane(card, torch.device("cpu"))
    made = source(None, x)
    with card.stream(user):
        x.fill_(3.0)
        feed = ResidentFeed(ResidentData(made, lane), 0, lane)
    assert take(feed, lane, 0, 0)[0].tolist() == [[3.0, 3.0]] * BATCH
    assert card.races == []


@pytest.mark.parametrize("wrong", [-1, LENGTH])
def test_a_wrong_index_never_reaches_the_device(wrong):
    class Sampler:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter([0, wrong, 1, 2])

    feed, lane = on_card(source(SamplerOrder(Sampler(), 2, drop_last=False)))
    with pytest.raises(DataError, match=f"epoch 1 holds index {wrong}, and the tensors have 23") as caught:
        take(feed, lane, 0, 1)
    assert caught.value.indices == (wrong,)


def test_a_part_of_a_batch():
    made = source()
    feed, lane = on_card(made)
    with lane.on(lane.compute):
        portion = feed.take(1, 2, SampleRange(1, 4))
        x, y = portion.rows(1, 3).batch
    index = made.index(1, 2)[2:4]
    assert torch.equal(x, X[index])
    assert torch.equal(y, Y[index])
    assert portion.samples == 3
    assert lane.card.races == []
    assert feed.close()
