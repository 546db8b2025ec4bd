"""Part of unequal devices' time that a user's own loop keeps: throughput over the sum of the devices alone.

Forward and backward of a device are timed waits in proportion to its samples; like a GPU's they release the
interpreter. "Solo" is the same loop on each device alone, in the same run. Rebalancing has settled before the
clock starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.harness import options, report
from flowdp.policy.shares import ThroughputBalance

MIXES: dict[str, tuple[float, ...]] = {
    "1:2.5 at 8 ms": (8.0, 20.0),
    "1:2.5 at 16 ms": (16.0, 40.0),
    "1:2.5 at 32 ms": (32.0, 80.0),
}
"""Milliseconds of each device for a whole batch."""

BATCH_SIZE = 256
"""So large that one sample more or less on a device does not matter."""

SETTLED = 75
"""Steps before the clock starts: ratios are recomputed after 10 and 60."""

STEPS = 50
ONE_THREAD = flowdp.ProcessTuning(openmp=False)


class _Wait(torch.autograd.Function):
    """Waits a third of the time in forward, the rest in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms_per_sample: float) -> Tensor:
        ctx.ms = ms_per_sample * len(x)
        time.sleep(ctx.ms / 3e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.ms / 1.5e3)
        return gradient, None


class Slow(nn.Module):
    """A small model on devices that take this long for a batch: each is known by the thread of its rank."""

    def __init__(self, ms: Sequence[float]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.ms_per_sample = [own / BATCH_SIZE for own in ms]

    def forward(self, x: Tensor) -> Tensor:
        prefix, _, rank = threading.current_thread().name.rpartition("-")
        own = self.ms_per_sample[int(rank) if prefix == "flowdp-replica" else 0]
        waited: Tensor = _Wait.apply(self.body(x), own)  # type: ignore[no-untyped-call]
        return waited


@contextmanager
def balanced() -> Iterator[None]:
    """With the ratios that flowdp chooses."""
    yield


@contextmanager
def lockstep() -> Iterator[None]:
    """With equal ratios throughout."""
    own = ThroughputBalance.update
    try:
        ThroughputBalance.update = lambda *_: False  # type: ignore[method-assign]
        yield
    finally:
        ThroughputBalance.update = own  # type: ignore[method-assign]


def loss_of(context: flowdp.LossContext) -> Tensor:
    return nn.functional.cross_entropy(context.output, context.batch[1])


def devices(ms: Sequence[float], cadence: bool) -> flowdp.DataParallel:
    """One device per time."""
    model = Slow(ms)
    return flowdp.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        devices=["cpu"] * len(ms),
        cadence=cadence,
        loss_fn=loss_of,
        tune_process=ONE_THREAD,
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH_SIZE, 64), torch.randint(0, 10, (BATCH_SIZE,))


def by_call(ms: Sequence[float]) -> float:
    """Samples per second of `dp(x)`, which splits each batch."""
    x, y = batch()
    with devices(ms, cadence=False) as dp:

        def step() -> int:
            nn.functional.cross_entropy(dp(x), y).backward()
            dp.step()
            return len(y)

        return _samples_per_s(repeat(step), SETTLED, STEPS)


def by_window(ms: Sequence[float]) -> float:
    """Samples per second of windows of whole batches."""
    with devices(ms, cadence=True) as dp:
        windows = iter(dp.epoch(repeat(batch())))

        def steps() -> Iterator[Callable[[], int]]:
            for window in windows:

                def step(window: flowdp.Window = window) -> int:
                    dp.forward_batch(window)
                    dp.step()
                    return window.samples

                yield step

        rate = _samples_per_s(steps(), 10, max(10, STEPS // 10))
        windows.close()  # type: ignore[attr-defined]
        return rate


def _samples_per_s(steps: Iterable[Callable[[], int]], warm_up: int, measured: int) -> float:
    """Samples per second; a step's time includes fetching its window."""
    samples, start = 0, time.perf_counter()
    for number, step in enumerate(steps, 1):
        samples += step()
        if number == warm_up:
            samples, start = 0, time.perf_counter()
        if number == warm_up + measured:
            break
    return samples / (time.perf_counter() - start)


def solo(ms: float) -> float:
    """Samples per second of one device alone."""
    x, y = batch()
    with devices([ms], cadence=False) as dp:

        def step() -> int:
            nn.functional.cross_entropy(dp(x), y).backward()
            dp.step()
            return len(y)

        return _samples_per_s(repeat(step), 5, max(20, int(500 / ms)))


def main() -> None:
    parser = options(__doc__, pairs=3)
    parser.add_argument("--mix", action="append", choices=MIXES, help="only this one (may repeat)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    ways = {
        "balancer": (by_call, balanced),
        "windows": (by_window, balanced),
        "lockstep": (by_call, lockstep),
    }
    for mix in arguments.mix or MIXES:
        for way, (measure, setting) in ways.items():
            values = []
            for _ in range(arguments.pairs):
                alone = sum(solo(ms) for ms in MIXES[mix])
                with setting():
                    values.append(measure(MIXES[mix]) / alone)
            figures[f"{mix}, {way}"] = median(values)
            print(f"{f'{mix}, {way}':<28}{min(values):.3f} to {max(values):.3f}", flush=True)
    report("balance", [], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
