"""Tests of the path from a step's batches to its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.data.batches import Portion
from flowdp.data.epoch_order import EpochOrder
from flowdp.data.feed import Feed
from flowdp.data.tensor_source import TensorSource
from flowdp.engine.micro_batches import MicroBatcher
from flowdp.machine.worker import Step
from flowdp.protocol.messages import SampleRange


class Slow(Feed):
    """Has a batch when the test allows it."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.there: set[int] = set()
        self.taken: list[int] = []
        self.followed: list[Any] = []

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Any:
        if batch not in self.there:
            return None
        self.taken.append(batch)
        return self.source.take(0, epoch, batch, part)

    def start(self, notify: Any) -> None: ...
    def follow(self, upcoming: Any) -> None:
        self.followed.append(upcoming)
        raise RuntimeError("the device is dead")

    def release(self) -> None: ...
    def wake(self, epoch: int, batch: int) -> None: ...
    def fit(self) -> None: ...
    def close(self) -> bool:
        return True


def batcher_of(feed: Any, source: Any, width: int) -> MicroBatcher:
    replica: Any = SimpleNamespace(width=width, module=nn.Linear(1, 1), function=None)
    unused: Any = None
    return MicroBatcher(feed, source, replica, unused, unused, unused)


def open_intake(width: int, samples: int = 11) -> tuple[MicroBatcher, Slow]:
    order = EpochOrder(samples, 2, 0, shuffle=False, drop_last=False)
    source = TensorSource([torch.arange(samples)], lambda parts: parts[0], order)
    feed = Slow(source)
    return batcher_of(feed, source, width), feed


def test_micro_batches_of_several() -> None:
    batcher, feed = open_intake(2)
    feed.there = set(range(6))
    step = Step(0, (0, 1, 2, 3, 4, 5), 0)
    micros = []
    while not batcher.is_last(step):
        micro = batcher.next(step)
        assert micro is not None
        micros.append((micro.batch.tolist(), micro.samples, micro.share))
    assert micros == [
        ([0, 1, 2, 3], 4, 4 / 12),
        ([4, 5, 6, 7], 4, 4 / 12),
        ([8, 9, 10], 3, 3 / 12),
    ]
    assert (batcher.samples, batcher.factor) == (11, 12 / 11)
    assert batcher.taken
    assert [(kept.batch.tolist(), kept.samples, kept.share) for kept in batcher.micros] == micros
    batcher.end(step)
    assert not batcher.taken
    assert not batcher.micros
    assert not batcher.is_last(step)


def test_it_goes_on_where_it_was() -> None:
    batcher, feed = open_intake(2)
    step = Step(0, (0, 1, 2), 0)
    feed.there = {0}
    assert batcher.next(step) is None
    assert (batcher.taken, batcher.samples) == (1, 0)
    assert batcher.next(step) is None
    feed.there = {1, 2}
    first, second = batcher.next(step), batcher.next(step)
    assert first is not None
    assert second is not None
    assert [first.batch.tolist(), second.batch.tolist()] == [[0, 1, 2, 3], [4, 5]]
    assert feed.taken == [0, 1, 2]
    assert batcher.is_last(step)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_end_of_the_data_cuts_a_step_short(width: int) -> None:
    """The batches taken are trained, even if they are no whole micro-batch."""
    batcher, feed = open_intake(width)
    feed.there = {0, 1}
    trained: list[int] = []
    step = Step(0, (0, 1, 2, 3), 0)
    while (micro := batcher.next(step)) is not None:
        trained += micro.batch.tolist()
    cut = Step(0, (0, 1), 0)
    while not batcher.is_last(cut):
        micro = batcher.next(cut)
        assert micro is not None
        trained += micro.batch.tolist()
    assert trained == [0, 1, 2, 3]
    assert batcher.samples == 4


def test_a_part_is_a_portion_and_counts_for_itself() -> None:
    batcher, feed = open_intake(1)
    feed.there = {1}
    micro = batcher.next(Step(0, (1,), 0, part=SampleRange(1, 2)))
    assert micro is not None
    assert isinstance(micro.batch, Portion)
    assert micro.batch.rows(0, 1).tolist() == [3]
    assert (micro.samples, micro.share, batcher.factor) == (1, 1.0, 1.0)


class Keeping(TensorSource):
    """Records its calls."""

    def __init__(self, *given: Any, keeps: bool) -> None:
        super().__init__(*given)
        self.keeps = keeps
        self.told: list[Any] = []
        self.feed: Slow

    def settle(self, keys: Sequence[tuple[int, int]]) -> None:
        self.told.append(list(keys))

    def reclaim(self, rank: int) -> None:
        assert self.feed.followed == [()], "the feed may take it again"
        self.told.append(rank)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_in_a_mean_is_settled(keeps: bool) -> None:
    order = EpochOrder(11, 2, 0, shuffle=False, drop_last=False)
    source = Keeping([torch.arange(11)], lambda parts: parts[0], order, keeps=keeps)
    feed = source.feed = Slow(source)
    feed.there = set(range(6))
    batcher = batcher_of(feed, source, 2)

    def train(*steps: Step) -> None:
        for step in steps:
            while not batcher.is_last(step):
                batcher.next(step)
            batcher.end(step)

    train(Step(0, (0, 1, 2), 0), Step(1, (3,), 1))
    batcher.settle()
    batcher.settle()  # a round without a step
    train(Step(1, (4,), 2))
    assert source.told == ([[(0, 0), (0, 1), (0, 2), (1, 3)]] if keeps else [])
    batcher.lose(7)
    assert source.told[keeps:] == [7]
