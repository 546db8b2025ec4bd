"""Batches and copies by hand, on an emulated machine.

In a run, other waits come before some of those of a feed: the start of a run waits for the models, and a
report for the steps of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from flowdp.data.copy_spans import CopySpans
from flowdp.data.epoch_order import EpochOrder
from flowdp.data.resident import ResidentData, ResidentFeed
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import CudaLane
from flowdp.modules.copying import make_replica
from flowdp.policy.efficiency import Activity
from flowdp.replica.factories import build_models
from flowdp.timeline.spans import RankSpans
from tests.late.device import LateCuda
from tests.late.doors import Door, differences, late, perceptron

__all__ = ["FEEDS"]

LENGTH, BATCH = 23, 5


def resident(_cuda: LateCuda) -> list[str]:
    """Batches of tensors that the caller makes on the device, in several epochs, without a wait."""
    lane = CudaLane(torch.device("cuda:0"))
    (numbers,) = late([torch.arange(LENGTH, dtype=torch.float64)])
    order = EpochOrder(LENGTH, BATCH, 7, shuffle=True, drop_last=False)
    source = TensorSource((numbers,), tuple, order)
    feed = ResidentFeed(ResidentData(source, lane), lane)
    batches: list[tuple[Tensor, Tensor]] = []
    for epoch in range(4):
        for batch in range(source.batches):
            with lane.on(lane.compute):
                (rows,) = feed.take(epoch, batch)
                batches.append((rows, source.index(epoch, batch)))
                feed.release()
    lane.drain()
    wrong = [rows for rows, index in batches if rows.cpu().tolist() != index.tolist()]
    feed.close()
    return [f"{len(wrong)} of {len(batches)} batches are wrong"] if wrong else []


class Spans(RankSpans):
    """Spans, kept."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def add(self, activity: Activity, start_s: float, end_s: float, count: int = 1) -> None:
        self.starts_s.append(start_s)


def spans(cuda: LateCuda) -> list[str]:
    """Times of copies, on the host's clock: none begins before the host has called for it."""
    lane, kept = CudaLane(torch.device("cuda:0")), Spans()
    called_s = []
    with lane.on(lane.copy):
        made = CopySpans(lane, kept)
        for _ in range(3):
            called_s.append(perf_counter())
            made.begin()
            torch.ones(2, device="cuda:0")
            made.end()
            cuda.current_stream().synchronize()
        made.close()
    is_early = any(start < called for start, called in zip(kept.starts_s, called_s, strict=True))
    return ["a copy begins before it was called"] if is_early else []


def models(copy_to: Callable[[nn.Module, Sequence[CudaLane]], Sequence[nn.Module]]) -> Door:
    """Models that are copied from one that the caller has made, by work that is not done yet."""

    def work(_cuda: LateCuda) -> list[str]:
        module = perceptron().to("cuda:0")
        for parameter in module.parameters():
            (value,) = late([parameter.detach().cpu()])
            parameter.data.copy_(value + 1)
        expected = perceptron()
        for parameter in expected.parameters():
            parameter.data += 1
        lanes = [CudaLane(torch.device("cuda", index)) for index in range(2)]
        made = copy_to(module, lanes)
        for lane in lanes:
            lane.drain()
        return [fault for copied in made for fault in differences(copied, expected)]

    return Door(f"models of {copy_to.__name__}", work)


def copies(module: nn.Module, lanes: Sequence[CudaLane]) -> Sequence[nn.Module]:
    return [make_replica(module, None, lane) for lane in lanes]


FEEDS = [
    Door("resident by hand", resident),
    Door("spans of copies", spans),
    models(build_models),
    models(copies),
]
