"""A dataset in Python beside launches: read by a thread under the interpreter's lock, or by processes.

The model is a GPT of small kernels, whose host launches without a pause, and a sample of the dataset takes
some Python code to make. With `num_workers=0` both need the lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.gpu.part import Clock, Figure, Finding, Place
from bench.harness import compare
from bench.models import Gpt, predict_next, texts

BATCH_SIZE, LENGTH, TOKENS = 8, 32, 128


class InPython(Dataset[Any]):
    """Texts, each of which takes some 100 us of Python.

    Args:
        data: Texts [samples, length + 1].
        loops: Turns of a loop for each.
    """

    def __init__(self, data: Tensor, loops: int) -> None:
        self._data = data
        self._loops = loops

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        total = 0
        for turn in range(self._loops):
            total += turn % 7
        return (self._data[index] + min(total, 0),)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def flowdp_ms(place: Place, dataset: Any, workers: int | None, steps: int) -> float:
    clock = Clock(place, steps)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        clock.tick()
        return predict_next(model, batch)

    flowdp.Trainer(
        partial(Gpt, layers=place.pick(12, 2), width=64, heads=4, length=LENGTH, tokens=TOKENS),
        adam,
        loss,
        dataset=dataset,
        batch_size=BATCH_SIZE,
        reading=None if workers is None else flowdp.ReadingOptions(num_workers=workers),
        max_steps=clock.calls,
        devices=[place.device],
        progress=False,
    ).fit()
    return clock.ms


def measure(place: Place) -> Iterator[Finding]:
    steps = place.pick(150, 10)
    data = texts(BATCH_SIZE * (steps + 50), LENGTH, TOKENS)
    dataset = InPython(data[0], loops=place.pick(2500, 100))
    start_s = perf_counter()
    for index in range(BATCH_SIZE):
        dataset[index]
    yield Figure("reading: a batch alone, ms", 1e3 * (perf_counter() - start_s))
    resident = partial(flowdp_ms, place, data, None, steps)
    for name, workers in place.pick((("a thread", 0), ("4 processes", 4)), (("a thread", 0),)):
        sides = {name: partial(flowdp_ms, place, dataset, workers, steps), "data there": resident}
        yield compare(f"reading by {name}", sides, pairs=place.pick(3, 1))
