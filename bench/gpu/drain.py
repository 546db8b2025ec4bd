"""Idle time of a device at a mean: steps of 5 ms under sync and exact, against a mean every 16 steps.

A step is a few kernels that wait on the card and take nothing of it, so two ranks of one card run side by
side like two devices; and the model is small, so the mean itself takes next to no time. A share of a window
is one forward, however large it is, and no loss is checked, which would take forwards of its own. What is
left between a mean in each step and one in 16 is the time in which the device has nothing queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Figure, Finding, Place, timed_ms
from bench.harness import compare

STEP_MS, KERNELS = 5.0, 10
ANCHOR = 16
"""Steps between two means under cadence."""

WIDTH = 64

BATCH = 4
"""Samples of a step of a rank; under exact, of its share where all are equal."""


def sleep_cycles(place: Place) -> int:
    """Cycles of one of a step's kernels."""
    if not place.is_cuda:
        return 0
    trial = 10_000_000
    ms = timed_ms(place, lambda: torch.cuda._sleep(trial), repeats=5)
    return round(trial / ms * STEP_MS / KERNELS)


def step(cycles: int, model: nn.Module, batch: Any) -> Tensor:
    """A loss whose device time is that of its sleeping kernels."""
    if cycles:
        for _ in range(KERNELS):
            torch.cuda._sleep(cycles)
    loss: Tensor = model(batch).square().mean()
    return loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4, fused=True)


def step_ms(place: Place, loss: Callable[..., Tensor], policy: Any, ranks: int) -> float:
    """Milliseconds per step of a rank, in the second half of a run's steps."""
    steps = place.pick(160, 64)
    is_exact = policy == "exact"
    run = flowdp.Trainer(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)),
        sgd,
        loss,
        dataset=torch.ones(BATCH * ranks * steps, WIDTH),
        batch_size=BATCH * ranks if is_exact else None,
        per_device_batch_size=BATCH * ranks if is_exact else BATCH,
        max_steps=steps if is_exact else ranks * steps,
        devices=[place.device] * ranks,
        policy=policy,
        cadence=flowdp.CadenceOptions(anchor=ANCHOR, max_anchor=ANCHOR) if policy == "cadence" else None,
        failures=flowdp.FailureOptions(check_loss=False),
        progress=False,
    ).start()
    records = list(run.metrics("round"))
    run.join()
    # The record of an order has the steps of all ranks, and the first orders are short.
    so_far = list(accumulate(sum(one.steps) for one in records))
    half = [one for one, taken in zip(records, so_far, strict=True) if taken > so_far[-1] / 2]
    return ranks * sum(one.wall_ms for one in half) / sum(sum(one.steps) for one in half)


def measure(place: Place) -> Iterator[Finding]:
    cycles = sleep_cycles(place)
    loss = partial(step, cycles)
    if cycles:
        yield Figure(
            "drain: a kernel that waits, ms", timed_ms(place, lambda: torch.cuda._sleep(cycles), repeats=5)
        )
    for policy in ("sync", "exact"):
        sides = {name: partial(step_ms, place, loss, name, 2) for name in (policy, "cadence")}
        result = compare(
            f"drain, 2 replicas, steps of {STEP_MS:g} ms, {policy}", sides, pairs=place.pick(5, 1)
        )
        yield result
        often, seldom = result.medians
        yield Figure(f"drain: a mean under {policy}, ms", (often - seldom) * ANCHOR / (ANCHOR - 1))
