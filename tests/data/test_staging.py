"""Tests of batches of any form on their way to a device, and of the times of copies on faked streams."""

from __future__ import annotations

import queue
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.data.staging import HOST_SLOTS, IN_FLIGHT, CopySpans, Staging
from flowdp.device.streams import QUIET, StreamLane
from flowdp.policy.efficiency import Activity
from flowdp.timeline.spans import RankSpans
from tests.data.cards import CardLane
from tests.data.opening import opened
from tests.data.test_prefetch import BATCHES, tensors
from tests.fakes import FakeCuda
from tests.limits import HANG_S


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
    assert staging._buffers[-1][2] == [leaf]
    assert lane.pins == 0


class Buffered:
    """A dataset that fills one pinned buffer again and again."""

    def __init__(self, pins: set[int]) -> None:
        self.buffer = torch.empty(4, 3)
        pins.add(self.buffer.data_ptr())

    def __len__(self) -> int:
        return 24

    def get_batch(self, indices: list[int]) -> Tensor:
        return self.buffer.copy_(torch.tensor(indices)[:, None])


def test_a_pinned_batch_of_a_dataset_is_copied_once_on_the_host(monkeypatch):
    pins: set[int] = set()
    copies: list[int] = []
    empty_like, copy, clone = torch.empty_like, Tensor.copy_, Tensor.clone

    def made(like: Tensor, *, pin_memory: bool = False, **options: Any) -> Tensor:
        memory = empty_like(like, **options)
        if pin_memory:
            assert QUIET.locked(), "pinned while a collective may be launched"
            pins.add(memory.data_ptr())
        return memory

    def counted(call: Any) -> Any:
        def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            copies.append(tensor.numel())
            return call(tensor, *arguments, **options)

        return counting

    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor, *_: tensor.data_ptr() in pins)
    monkeypatch.setattr(torch, "empty_like", made)
    dataset = Buffered(pins)
    source = opened(dataset, 4, epochs=1, shuffle=False)
    notes: queue.Queue[tuple[int, int]] = queue.Queue()
    lane = Counting()
    feed = PrefetchFeed(source, 0, lane, gauge=RingGauge(lane))
    feed.start(lambda epoch, batch: notes.put((epoch, batch)))
    monkeypatch.setattr(Tensor, "copy_", counted(copy))
    monkeypatch.setattr(Tensor, "clone", counted(clone))
    source.start(wake=lambda rank, *key: feed.wake(*key), failed=lambda error: None)
    feed.follow([(0, batch, None) for batch in range(6)])
    for number in range(6):
        with lane.on(lane.compute):
            while (batch := feed.take(0, number)) is None:
                notes.get(timeout=HANG_S)
            assert batch[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            feed.release()
    monkeypatch.undo()
    assert feed.close()
    assert source.close()
    # The dataset's own, the clone of it, and the copy to the device.
    assert copies == [12] * 3 * 6
    assert lane.pins == 0, "no staging beside it"


def test_a_leaf_with_a_graph_keeps_it():
    lane = CardLane()
    staging, leaf = Staging(lane), torch.ones(3, requires_grad=True)
    with lane.on(lane.copy):
        [moved] = staging.bring([leaf])
    moved.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3))


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
            notes.get(timeout=HANG_S)
        feed.release()
    assert feed.close()
    assert spans.read(Activity.TRANSFER)[:, 3].sum() == BATCHES
