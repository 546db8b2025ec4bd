"""Memory of replicas, and batches ahead on an empty card, a half full and a nearly full one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Figure, Finding, Place
from flowdp.data.prefetch import PrefetchFeed

STEPS = 60


class Wide:
    """Batches of rows of this many bytes, made on the host."""

    def __init__(self, length: int, row_bytes: int) -> None:
        self._length = length
        self._rows = torch.ones(64, row_bytes // 4)

    def __len__(self) -> int:
        return self._length

    def get_batch(self, indices: list[int]) -> Tensor:
        return self._rows[: len(indices)]


def deep(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-6, fused=True)


def bytes_of_training(place: Place, ranks: int) -> float:
    """Peak of the allocator's memory during a run with AdamW, in bytes for each parameter of a replica."""
    width, layers = place.pick(4096, 64), place.pick(6, 2)
    place.wait()  # torch counts from its first use of the card on
    if place.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
    before = torch.cuda.memory_allocated(place.device) if place.is_cuda else 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).square().mean()
        return value

    flowdp.Trainer(
        partial(deep, width, layers),
        adam,
        loss,
        dataset=torch.ones(8 * ranks * 10, width),
        per_device_batch_size=8,
        max_steps=10 * ranks,
        policy="sync",
        devices=[place.device] * ranks,
        progress=False,
    ).fit()
    peak = torch.cuda.max_memory_allocated(place.device) if place.is_cuda else 0
    return (peak - before) / (width * width * layers * ranks)


@contextmanager
def filled(place: Place, part: float) -> Iterator[None]:
    """Let this part of the card be in use."""
    taken = None
    if place.is_cuda and part:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(place.device)
        taken = torch.empty(max(0, int(free - (1 - part) * total)), dtype=torch.uint8, device=place.device)
    try:
        yield
    finally:
        del taken
        if place.is_cuda:
            torch.cuda.empty_cache()


def ring_depth(place: Place) -> tuple[int, float]:
    """Batches ahead at the end of a run on batches of 64 MiB, and the largest number on the way."""
    rows = 16
    dataset: Any = Wide(rows * STEPS, place.pick(4 << 20, 256))
    depths: list[int] = []
    feeds: list[Any] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        depths.extend(feed.depth for feed in feeds if isinstance(feed, PrefetchFeed))
        if place.is_cuda:
            torch.cuda._sleep(20_000_000)  # some 10 ms: longer than a batch takes to come
        value: Tensor = model(batch[:, :8]).square().mean()
        return value

    run = flowdp.Trainer(
        nn.Linear(8, 1),
        lambda params: torch.optim.SGD(params, lr=1e-9),
        loss,
        dataset=dataset,
        batch_size=rows,
        epochs=2,  # the gauge is read in each
        devices=[place.device],
        progress=False,
    ).start()
    feeds.extend(worker.parts.feed for worker in run._engine._parts.workers)  # type: ignore[union-attr]
    run.join()
    return (depths or [0])[-1], max(depths, default=0)


def measure(place: Place) -> Iterator[Finding]:
    for ranks in (1, 2):
        label = f"memory, {ranks} replica{'s' if ranks > 1 else ''} with AdamW"
        yield Figure(f"{label}: bytes for each parameter", bytes_of_training(place, ranks))
    for part in (0.0, 0.5, 0.97):
        with filled(place, part):
            last, most = ring_depth(place)
        yield Figure(f"memory, {part:.0%} of the card in use: batches of 64 MiB ahead", last)
        yield Figure(f"memory, {part:.0%} of the card in use: the most of them", most)
