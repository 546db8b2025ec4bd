"""Tests of the times of copies, on faked streams."""

from __future__ import annotations

import queue
from time import perf_counter

import torch

from flowdp.data.copy_spans import IN_FLIGHT, CopySpans
from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.device.streams import StreamLane
from flowdp.policy.efficiency import Activity
from flowdp.timeline.spans import RankSpans
from tests.data.cards import CardLane
from tests.data.test_prefetch import BATCHES, tensors
from tests.fakes import FakeCuda

CPU = torch.device("cpu")


def test_copies_lie_where_they_were_on_the_clock_of_the_host() -> None:
    spans, starts, ends = RankSpans(), [], []
    copies = CopySpans(StreamLane(CPU, FakeCuda()), spans)
    for number in range(10):
        starts.append(perf_counter())
        with copies.copy():
            pass
        ends.append(perf_counter())
        # None is waited for before it has to be.
        assert len(spans.read(Activity.TRANSFER)) == max(0, number + 1 - IN_FLIGHT)
    copies.close()
    rows = spans.read(Activity.TRANSFER)
    assert rows[:, 3].tolist() == [1] * 10
    # The first mark was waited for a moment before the clock was read.
    for (start, end, busy, _), earliest, latest in zip(rows.tolist(), starts, ends, strict=True):
        assert earliest - 1e-9 <= start <= end <= latest + 0.05
        assert abs(end - start - busy) < 1e-12


def test_a_feed_records_each_batch() -> None:
    spans, source = RankSpans(), tensors()
    notes: queue.Queue[tuple[int, int]] = queue.Queue()
    lane = CardLane()
    feed = PrefetchFeed(source, 0, lane, gauge=RingGauge(lane), spans=spans)
    feed.start(lambda epoch, batch: notes.put((epoch, batch)))
    feed.follow([(0, batch, None) for batch in range(BATCHES)])
    for batch in range(BATCHES):
        while feed.take(0, batch) is None:
            notes.get(timeout=60)
        feed.release()
    assert feed.close()
    assert spans.read(Activity.TRANSFER)[:, 3].sum() == BATCHES
