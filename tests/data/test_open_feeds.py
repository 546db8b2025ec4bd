"""Tests of the choice of a rank's feed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowdp.data.open_feeds import open_feeds
from flowdp.data.prefetch import PrefetchFeed
from flowdp.data.resident import ResidentFeed
from flowdp.data.source import Feed
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import HostLane
from tests.data.cards import Card, CardLane
from tests.data.opening import opened

X = torch.arange(64.0).reshape(32, 2)
NEEDED = X.nbytes + 2 * 32 * 8
HOST = HostLane(torch.device("cpu"))


def source(dataset: Any = X) -> Any:
    return opened(dataset, 4, shuffle=False, epochs=2)


def kinds(feeds: list[Feed]) -> list[type]:
    return [type(feed) for feed in feeds]


def test_cpu_ranks_take_the_sources_own_batches():
    made = source()
    feeds = open_feeds(made, [HOST, HOST])
    assert kinds(feeds) == [Feed, Feed]
    assert feeds[1].take(0, 1).tolist() == X[4:8].tolist()  # type: ignore[union-attr]


def test_a_dataset_that_fits_is_resident_and_shared():
    card = Card()
    lanes = [CardLane(card), CardLane(card), HOST]
    feeds = open_feeds(source(), lanes)
    assert kinds(feeds) == [ResidentFeed, ResidentFeed, Feed]
    assert feeds[0]._tensors is feeds[1]._tensors  # type: ignore[attr-defined]
    assert card.allocated == X.nbytes
    assert card.peaks_reset == 1


@pytest.mark.parametrize(("spare", "kind"), [(0, ResidentFeed), (-1, PrefetchFeed)])
def test_what_does_not_fit_is_prefetched(spare, kind):
    # Half of the rest after nine tenths.
    card = Card(total=10**6, used=9 * 10**5 - 2 * NEEDED - spare)
    lane = CardLane(card)
    (feed,) = open_feeds(source(), [lane])
    assert type(feed) is kind


def test_the_part_of_the_device_and_the_depth_are_the_users():
    card = Card(total=10**6, used=10**6 // 2)
    (feed,) = open_feeds(source(), [CardLane(card)], usage=0.5)
    assert type(feed) is PrefetchFeed, "the other half is in use"
    (feed,) = open_feeds(source(), [CardLane(card)], usage=0.5, depth=0)
    assert feed.depth == 0  # type: ignore[attr-defined]
    (feed,) = open_feeds(source(), [CardLane(card)])
    assert type(feed) is ResidentFeed


def test_tensors_of_another_device_that_do_not_fit_are_streamed_from_the_host():
    class Far:
        """A tensor on a CUDA device."""

        device = torch.device("cuda", 1)
        nbytes = X.nbytes
        brought = 0

        def cpu(self) -> torch.Tensor:
            Far.brought += 1
            return X

    far: Any = Far()
    made = TensorSource([far], lambda parts: parts[0], source()._order)
    card = Card(total=100)
    feeds = open_feeds(made, [CardLane(card), CardLane(card), HOST])
    assert kinds(feeds) == [PrefetchFeed, PrefetchFeed, Feed]
    assert feeds[2].take(0, 0).tolist() == X[:4].tolist()  # type: ignore[union-attr]
    assert Far.brought == 1
