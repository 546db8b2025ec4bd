"""Choice of each rank's feed: once, before the workers start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from flowdp.data.prefetch import PrefetchFeed, RingGauge
from flowdp.data.resident import ResidentData, ResidentFeed
from flowdp.data.source import Feed, Source
from flowdp.data.tensor_source import TensorSource
from flowdp.device.memory import empty_cache, read_memory, reset_peak
from flowdp.device.streams import QUIET, Lane
from flowdp.policy.budget import USAGE, fits
from flowdp.timeline.spans import RankSpans

__all__ = ["open_feeds"]


def open_feeds(
    source: Source,
    lanes: Sequence[Lane],
    *,
    held: Sequence[int] | None = None,
    spans: Sequence[RankSpans] = (),
    usage: float = USAGE,
    depth: int | None = None,
) -> list[Feed]:
    """One feed per rank: a plain one on the CPU, on CUDA resident where the dataset fits, else prefetched.

    Only a dataset of tensors can be resident, or a subset that has at least half of them. Tensors on another
    device than the rank's are copied there, or to the host once where they do not fit.

    Args:
        source: Source of all ranks' batches.
        lanes: One per rank.
        held: Batches that each rank uses at a time; None: one.
        spans: Recorders of the ranks' spans; empty: there is no timeline.
        usage: Part of a device that may be in use.
        depth: Batches that a rank prefetches, at most; None: by the device's memory.

    Threads:
        The one that made the dataset's tensors, before the workers exist.
    """
    on_host = cache(lambda: source.on_host() if isinstance(source, TensorSource) else source)
    feeds: dict[int, Feed] = {}
    for device in dict.fromkeys(lane.device for lane in lanes):
        ranks = [rank for rank, lane in enumerate(lanes) if lane.device == device]
        lane = lanes[ranks[0]]
        if not lane.is_async:
            feeds |= {rank: Feed(on_host(), rank) for rank in ranks}
            continue
        reset_peak(lane)
        data = _bring(source, lane, len(ranks), usage)
        if data is not None:
            feeds |= {rank: ResidentFeed(data, rank, lanes[rank]) for rank in ranks}
            continue
        gauge = RingGauge(lane, len(ranks), usage=usage, limit=depth)
        for rank in ranks:
            feeds[rank] = PrefetchFeed(
                on_host(),
                rank,
                lanes[rank],
                gauge=gauge,
                held=1 if held is None else held[rank],
                spans=spans[rank] if spans else None,
            )
    return [feeds[rank] for rank in range(len(lanes))]


def _bring(source: Source, lane: Lane, ranks: int, usage: float) -> ResidentData | None:
    """The dataset on a device, where it is made of tensors and fits there."""
    memory = read_memory(lane)
    if not isinstance(source, TensorSource) or source.is_sparse or memory is None:
        return None
    if not fits(memory, ResidentData.needed_bytes(source, lane.device, ranks), usage=usage):
        return None
    try:
        return ResidentData(source, lane)
    except torch.OutOfMemoryError:
        pass
    # Here, where no traceback keeps the copies so far: it lies in the cache, for the copy stream alone.
    with QUIET:
        empty_cache(lane)
    return None
