"""Batches and copies by hand, on an emulated machine.

In a run, other waits come before some of those of a feed: the start of a run waits for the models, and a
report for the steps of an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data.epoch_order import EpochOrder
from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.data.resident import ResidentData, ResidentFeed
from flowdp.data.staging import CopySpans, Staging
from flowdp.data.tensor_source import TensorSource
from flowdp.data_parallel.loader import Epoch
from flowdp.device.streams import StreamLane
from flowdp.engine.shared_batches import SharedBatches
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.efficiency import Activity
from flowdp.replica.factories import build_models
from flowdp.timeline.spans import RankSpans
from tests.late.device import LateCuda
from tests.late.doors import Door, differences, late, perceptron
from tests.limits import HANG_S

__all__ = ["FEEDS"]

LENGTH, BATCH = 23, 5


def resident(_cuda: LateCuda) -> list[str]:
    """Batches of tensors that the caller makes on the device, in several epochs, without a wait."""
    lane = StreamLane(torch.device("cuda:0"))
    (numbers,) = late([torch.arange(LENGTH, dtype=torch.float64)])
    order = EpochOrder(LENGTH, BATCH, 7, shuffle=True, drop_last=False)
    source = TensorSource((numbers,), tuple, order)
    feed = ResidentFeed(ResidentData(source, lane), 0, lane)
    batches: list[tuple[Tensor, Tensor]] = []
    for epoch in range(4):
        for batch in range(source.batches):
            with lane.on(lane.compute):
                (rows,) = feed.take(epoch, batch).batch
                batches.append((rows, source.index(epoch, batch)))
                feed.release()
    lane.drain()
    wrong = [rows for rows, index in batches if rows.cpu().tolist() != index.tolist()]
    feed.close()
    return [f"{len(wrong)} of {len(batches)} batches are wrong"] if wrong else []


def closed(_cuda: LateCuda) -> list[str]:
    """A dataset on the device that is let go of when its last batch has been asked for, not made."""
    lane = StreamLane(torch.device("cuda:0"))
    order = EpochOrder(LENGTH, BATCH, 7, shuffle=True, drop_last=False)
    source = TensorSource((torch.arange(LENGTH, dtype=torch.float64),), tuple, order)
    feed = ResidentFeed(ResidentData(source, lane), 0, lane)
    with lane.on(lane.compute):
        (rows,) = feed.take(0, 0).batch
    feed.close()
    return read_after(lane, rows, source.index(0, 0), LENGTH)


def shared(_cuda: LateCuda) -> list[str]:
    """Tensors of an evaluation on the device, which the caller's work makes, gathered on another stream."""
    lane, faults = StreamLane(torch.device("cuda:0")), []
    for shuffle in (False, True):
        (numbers,) = late([torch.arange(LENGTH, dtype=torch.float64)])
        order = EpochOrder(LENGTH, BATCH, 7, shuffle=shuffle, drop_last=False)
        source = SharedBatches(TensorSource((numbers,), tuple, order)).source
        assert isinstance(source, TensorSource)
        with lane.on(lane.compute):
            rows = [source.gather(0, batch)[0] for batch in range(order.batches)]
        lane.drain()
        expected = [index for batch in range(order.batches) for index in source.indices(0, batch)]
        if torch.cat(rows).tolist() != expected or rows[0].device != numbers.device:
            faults.append(f"a batch is wrong, shuffle={shuffle}")
    return faults


class Told(PrefetchFeed):
    """A feed that tells when it has brought a batch."""

    def __init__(self, source: TensorSource, lane: StreamLane) -> None:
        super().__init__(source, 0, lane, gauge=RingGauge(lane))
        self.slots = threading.Semaphore(0)

    def _load(self, fetched: Any) -> None:
        super()._load(fetched)
        self.slots.release()


def shrunk(_cuda: LateCuda) -> list[str]:
    """A ring that gives the slot of a step's batch up, when the step has been called for, not done."""
    lane, notes = StreamLane(torch.device("cuda:0")), SimpleQueue[object]()
    order = EpochOrder(LENGTH, BATCH, 7, shuffle=True, drop_last=False)
    source = TensorSource((torch.arange(LENGTH, dtype=torch.float64),), tuple, order)
    feed = Told(source, lane)
    feed.start(lambda *key: notes.put(key))
    try:
        feed.follow([(0, batch, None) for batch in range(source.batches)])
        with lane.on(lane.compute):
            while (batch := feed.take(0, 0)) is None:
                notes.get(timeout=HANG_S)
            rows = batch[0].clone()
            del batch
            assert all(feed.slots.acquire(timeout=HANG_S) for _ in range(2))
            feed.release()
        feed.resize(0)
        return read_after(lane, rows, source.index(0, 0), BATCH)
    finally:
        feed.close()


def read_after(lane: StreamLane, rows: Tensor, expected: Tensor, size: int) -> list[str]:
    """Compare a batch when memory of the copy stream has been allocated again."""
    with lane.on(lane.copy):
        torch.full((size,), -1.0, dtype=torch.float64, device="cuda:0")
    lane.drain()
    return [] if rows.tolist() == expected.tolist() else ["a batch is wrong"]


def staged(_cuda: LateCuda) -> list[str]:
    """Batches of the host, which go through pinned memory that is used again."""
    lane = StreamLane(torch.device("cuda:0"))
    staging, moved = Staging(lane), []
    with lane.on(lane.copy):
        for number in range(9):
            moved += staging.bring([torch.full((number + 1,), float(number))])
    lane.drain()
    wrong = [number for number, rows in enumerate(moved) if set(rows.tolist()) != {float(number)}]
    return [f"batches {wrong} are wrong"] if wrong else []


def window(_cuda: LateCuda) -> list[str]:
    """A batch of a loop that its caller reads, on a stream of the caller's own, and lets go of."""
    lane, numbers = StreamLane(torch.device("cuda:0")), torch.arange(BATCH, dtype=torch.float64)
    read = next(iter(Epoch([numbers], [lane])))
    (piece,) = read.pieces
    piece.arrive()
    rows = piece.batch.clone()
    del read, piece
    return read_after(lane, rows, numbers, BATCH)


def made(*, ahead: bool) -> Callable[[LateCuda], list[str]]:
    """Batches that the caller makes on the device, on a stream of its own; the second rank trains them.

    Args:
        ahead: They are a list, made before and read by another thread. Else each is made when it is read.
    """

    def work(_cuda: LateCuda) -> list[str]:
        lanes = [StreamLane(torch.device("cuda:0")) for _ in range(2)]
        values = [torch.full((BATCH,), float(number), dtype=torch.float64) for number in range(2)]
        own = torch.cuda.Stream(device="cuda:0")
        with torch.cuda.stream(own):
            loader = list(late(values)) if ahead else late(values)
            read = next(iter(Epoch(loader, lanes, Cadence(2, CadenceOptions(anchor=1)))))
        found = []
        for piece in read.pieces:
            with lanes[piece.rank].on(lanes[piece.rank].compute):
                piece.arrive()
                found.append(piece.batch.clone())
        for lane in reversed(lanes):
            lane.compute.synchronize()
        rows = [rows.tolist() for rows in found]
        return [] if rows == [value.tolist() for value in values] else ["a batch is wrong"]

    return work


class Spans(RankSpans):
    """Spans, kept."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def add(self, activity: Activity, start_s: float, end_s: float, count: int = 1) -> None:
        self.starts_s.append(start_s)


def spans(cuda: LateCuda) -> list[str]:
    """Times of copies, on the host's clock: none begins before the host has called for it."""
    lane, kept = StreamLane(torch.device("cuda:0")), Spans()
    called_s = []
    with lane.on(lane.copy):
        made = CopySpans(lane, kept)
        for _ in range(3):
            called_s.append(perf_counter())
            with made.copy():
                torch.ones(2, device="cuda:0")
            cuda.current_stream().synchronize()
        made.close()
    is_early = any(start < called for start, called in zip(kept.starts_s, called_s, strict=True))
    return ["a copy begins before it was called"] if is_early else []


def models(copy_to: Callable[[nn.Module, Sequence[StreamLane]], Sequence[nn.Module]]) -> Door:
    """Models that are copied from one that the caller has made, by work that is not done yet."""

    def work(_cuda: LateCuda) -> list[str]:
        module = perceptron().to("cuda:0")
        for parameter in module.parameters():
            (value,) = late([parameter.detach().cpu()])
            parameter.data.copy_(value + 1)
        expected = perceptron()
        for parameter in expected.parameters():
            parameter.data += 1
        lanes = [StreamLane(torch.device("cuda", index)) for index in range(2)]
        made = copy_to(module, lanes)
        for lane in lanes:
            lane.drain()
        return [fault for copied in made for fault in differences(copied, expected)]

    return Door(f"models of {copy_to.__name__}", work)


FEEDS = [
    Door("resident by hand", resident),
    Door("resident, closed", closed),
    Door("shared batches, made late", shared),
    Door("a ring that gives a slot up", shrunk),
    Door("staged", staged),
    # Tensors are freed that a copy stream still reads.
    Door("a window that is let go of", window),
    Door("batches of a list, made late", made(ahead=True)),
    Door("batches of a loader, made late", made(ahead=False)),
    Door("spans of copies", spans),
    models(build_models),
]
