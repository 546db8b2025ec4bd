"""Tests of the CPU feed: a rank gets the source's own batches."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.data.epoch_order import EpochOrder
from flowdp.data.feed import DirectFeed
from flowdp.data.source import Source
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange


class Recorded(Source):
    """A source that has its second batch only after an early request for it."""

    def __init__(self) -> None:
        super().__init__(EpochOrder(9, 3, 0, shuffle=False, drop_last=False))
        self.asked: list[tuple[int, int, int, SampleRange | None]] = []
        self.expected: list[tuple[int, list[tuple[int, int, SampleRange | None]]]] = []

    def start(self, **_: Any) -> None: ...

    def expect(self, rank: int, upcoming: Any) -> None:
        self.expected.append((rank, list(upcoming)))

    def take(self, rank: int, epoch: int, batch: int, part: SampleRange | None = None) -> Any:
        self.asked.append((rank, epoch, batch, part))
        if batch == 2:
            raise DataError("broken")
        return f"batch {batch}" if batch == 0 or self.asked.count((rank, epoch, batch, part)) > 1 else None

    def give_back(self, epoch: int, batch: int, payload: Any, part: SampleRange | None = None) -> None:
        raise AssertionError("nothing was fetched that could be given back")

    def close(self) -> bool:
        raise AssertionError("the source is not the feed's to close")


def test_it_passes_everything_on():
    source, notes = Recorded(), list[tuple[int, int]]()
    feed = DirectFeed(source, 3)
    feed.start(lambda epoch, batch: notes.append((epoch, batch)))
    feed.follow([(0, 0, None), (0, 1, None), (0, 2, SampleRange(0, 1))])
    assert source.asked == []
    assert feed.take(0, 0) == "batch 0"
    feed.release()
    assert feed.take(0, 1) is None
    feed.follow([])
    feed.wake(0, 1)
    assert notes == [(0, 1)]
    feed.fit()
    assert feed.take(0, 1) == "batch 1"
    with pytest.raises(DataError, match="broken"):
        feed.take(0, 2, SampleRange(0, 1))
    assert source.asked == [(3, 0, 0, None), (3, 0, 1, None), (3, 0, 1, None), (3, 0, 2, SampleRange(0, 1))]
    upcoming = [(0, 0, None), (0, 1, None), (0, 2, SampleRange(0, 1))]
    assert source.expected == [(3, upcoming), (3, [])]
    assert feed.close()
