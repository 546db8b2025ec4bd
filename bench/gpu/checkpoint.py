"""Checkpoints of 300 million parameters: how long training stands still, and what is pinned for it.

The standstill is the longest time between two steps around a checkpoint, less the usual one. The second
checkpoint finds the pinned memory of the first. A file holds parameters and AdamW's two moments, 3.6 GB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Figure, Finding, Place

LAYERS = 3


def make(place: Place) -> nn.Module:
    """Linear layers, made and filled on the device: the host would take ten seconds for it."""
    width = place.pick(10_000, 64)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=place.device) for _ in range(LAYERS)))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-6, fused=True)


def pinned_bytes() -> int:
    """Host memory that torch has pinned, in use or kept."""
    stats = torch.cuda.host_memory_stats()
    # Versions of torch differ in which of the two is that.
    return max(int(stats.get(f"{name}.current", 0)) for name in ("allocated_bytes", "reserved_bytes"))


class Gaps:
    """Times between the beginnings of steps, on the host."""

    def __init__(self) -> None:
        self.marks_s: list[float] = []

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.marks_s.append(perf_counter())
        loss: Tensor = model(batch).square().mean()
        return loss

    def longest_ms(self, begin: int) -> float:
        """The longest gap from a step on, less the median."""
        marks = self.marks_s[begin:]
        gaps = [(b - a) * 1e3 for a, b in pairwise(marks)]
        return max(gaps) - median(gaps)


def measure(place: Place) -> Iterator[Finding]:
    width, gaps = place.pick(10_000, 64), Gaps()
    with tempfile.TemporaryDirectory() as folder:
        run = flowdp.Trainer(
            lambda: make(place),
            adam,
            gaps,
            dataset=torch.ones(64, width),
            batch_size=8,
            epochs=10**6,
            devices=[place.device],
            checkpoint=flowdp.CheckpointOptions(folder, every=10**9, unit="step", keep_last=1),
            progress=False,
        ).start()
        with run:
            seen: set[str] = set()
            records = run.metrics("round")
            for number in ("first", "second"):
                until = len(gaps.marks_s) + 20
                while len(gaps.marks_s) < until:
                    next(records)
                begin, start_s = len(gaps.marks_s), perf_counter()
                run.checkpoint()
                while not (files := {path.name for path in Path(folder).glob("*.pt")} - seen):
                    next(records)
                    if problems := run.status().problems:
                        raise RuntimeError("; ".join(problems))
                yield Figure(f"checkpoint, {number}: until the file is there, s", perf_counter() - start_s)
                yield Figure(f"checkpoint, {number}: standstill, ms", gaps.longest_ms(begin - 5))
                size = max(Path(folder, name).stat().st_size for name in files)
                yield Figure(f"checkpoint, {number}: size, GB", size / 1e9)
                if place.is_cuda:
                    yield Figure(f"checkpoint, {number}: pinned by now, MB", pinned_bytes() / 1e6)
                seen |= files
            run.stop()
