"""Overlap of copies and compute: pinned batches whose copy takes 80 % of the compute.

The compute is a chain of matrix products, long enough that the copy takes 80 % of it. Three loops take the
same step: flowdp on prefetched batches, a hand loop on one batch on the device (compute alone), and a hand
loop that copies each batch on its compute stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.gpu.part import Clock, Figure, Finding, Place, timed_ms
from bench.harness import compare

SHARE = 0.8


class PinnedBatches(Dataset[Any]):
    """Whole batches in pinned memory: nothing is read or collated.

    Args:
        place: Their device.
        batch_bytes: Bytes of a batch.
    """

    ROWS = 32

    def __init__(self, place: Place, batch_bytes: int) -> None:
        width = batch_bytes // 4 // self.ROWS
        self.batches = [
            torch.full((self.ROWS, width), float(number), pin_memory=place.is_cuda) for number in range(4)
        ]

    def __len__(self) -> int:
        return 512 * self.ROWS

    def get_batch(self, indices: list[int]) -> Tensor:
        return self.batches[indices[0] // self.ROWS % len(self.batches)]


class Compute:
    """A chain of matrix products that leaves its operands unchanged.

    Args:
        place: Its device.
        products: Number of products.
    """

    def __init__(self, place: Place, products: int) -> None:
        side = place.pick(2048, 48)
        kind = torch.bfloat16 if place.is_cuda else torch.float32
        self._a = torch.randn(side, side, device=place.device, dtype=kind)
        self._out = torch.empty_like(self._a)
        self.products = products

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self._a, self._a, out=self._out)

    def fill(self, place: Place, ms: float) -> None:
        """Set the number of products so that the compute takes this time."""
        self.products = 32
        self.products = max(1, round(ms / (timed_ms(place, self, repeats=10) / 32)))


def step_loss(compute: Compute, model: nn.Module, batch: Tensor) -> Tensor:
    """The whole step: the compute, and a loss that depends on the batch."""
    compute()
    loss: Tensor = model(batch[:, :8]).mean()
    return loss


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-6, fused=True)


def hand_ms(place: Place, loss: Callable[..., Tensor], batches: Iterator[Tensor], steps: int) -> float:
    model = nn.Linear(8, 1).to(place.device)
    optimizer = sgd(model.parameters())
    clock = Clock(place, steps)
    for batch in batches:
        clock.tick()
        if clock.is_over:
            break
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock.ms


def flowdp_ms(place: Place, loss: Callable[..., Tensor], dataset: PinnedBatches, steps: int) -> float:
    clock = Clock(place, steps, warmup=60)  # after the first rounds, and so after the ring has its size

    def ticking(model: nn.Module, batch: Tensor) -> Tensor:
        clock.tick()
        return loss(model, batch)

    flowdp.Trainer(
        nn.Linear(8, 1),
        sgd,
        ticking,
        dataset=dataset,
        batch_size=dataset.ROWS,
        reading=flowdp.ReadingOptions(shuffle=False),
        max_steps=clock.calls,
        devices=[place.device],
        runtime=flowdp.RuntimeOptions(capture=False),  # the clock ticks in the loss
        progress=False,
    ).fit()
    return clock.ms


def measure(place: Place) -> Iterator[Finding]:
    dataset = PinnedBatches(place, place.pick(64 << 20, 1 << 21))
    here = torch.empty_like(dataset.batches[0], device=place.device)
    copy_ms = timed_ms(place, lambda: here.copy_(dataset.batches[0], non_blocking=True), repeats=20)
    compute = Compute(place, 1)
    compute.fill(place, copy_ms / SHARE)
    compute_ms = timed_ms(place, compute, repeats=20)
    yield Figure("prefetch: copy of a batch, ms", copy_ms)
    yield Figure("prefetch: copy / compute", copy_ms / compute_ms)

    loss = partial(step_loss, compute)
    steps = place.pick(150, 20)

    copied = (batch.to(place.device, non_blocking=True) for batch in cycle(dataset.batches))
    ours = partial(flowdp_ms, place, loss, dataset, steps)
    alone = partial(hand_ms, place, loss, repeat(here), steps)
    in_turn = partial(hand_ms, place, loss, copied, steps)
    pairs = place.pick(7, 1)
    yield compare("step with prefetch / compute alone", {"flowdp": ours, "alone": alone}, pairs=pairs)
    yield compare("step with copies in turn / compute alone", {"in turn": in_turn, "alone": alone}, pairs=3)
