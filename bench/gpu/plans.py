"""First steps of a convolutional network in new threads: cuDNN's plans are kept for each thread.

The workers of a run are new threads, so each run finds its plans anew, where a loop of one thread finds them
once. A figure is the time of the first step, less that of a later one; the first of a process also loads the
kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import flowdp
from bench.gpu.part import Figure, Finding, Place
from bench.models import classify_bytes, photos, resnet18

LATER = 5


class Marks:
    """Times at the beginning of each step, with the device awaited."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._place.wait()
        self._marks_s.append(perf_counter())

    @property
    def extra_ms(self) -> float:
        """Time of the first step, less the median of the later ones."""
        steps = [(b - a) * 1e3 for a, b in pairwise(self._marks_s)]
        return steps[0] - median(steps[1:])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-4)


def make(place: Place) -> nn.Module:
    return resnet18(place.pick(64, 4))


def batch_of(place: Place) -> tuple[Tensor, Tensor]:
    return photos(place.pick(64, 2), place.pick(128, 32))


def by_hand(place: Place) -> float:
    """Extra time of the first step of a hand loop with a new model."""
    model, marks = make(place).to(place.device), Marks(place)
    optimizer = sgd(model.parameters())
    batch = tuple(part.to(place.device) for part in batch_of(place))
    for _ in range(1 + LATER):
        marks.mark()
        classify_bytes(model, batch).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    marks.mark()
    return marks.extra_ms


def by_flowdp(place: Place) -> float:
    """Extra time of the first step of a run."""
    marks = Marks(place)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        marks.mark()
        return classify_bytes(model, batch)

    x, y = batch_of(place)
    flowdp.Trainer(
        lambda: make(place),
        sgd,
        loss,
        dataset=(x, y),
        batch_size=len(x),
        max_steps=2 + LATER,
        devices=[place.device],
        progress=False,
    ).fit()
    return marks.extra_ms


def in_thread(measure: Callable[[Place], float], place: Place) -> float:
    """Measure in a new thread.

    Raises:
        RuntimeError: It failed.
    """
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(measure(place)))
    thread.start()
    thread.join()
    if not found:
        raise RuntimeError("the first steps in a new thread failed; see the log")
    return found[0]


def measure(place: Place) -> Iterator[Finding]:
    before = torch.backends.cudnn.benchmark
    try:
        for is_tried in (False, True):
            torch.backends.cudnn.benchmark = is_tried
            kind = "plans, benchmark" if is_tried else "plans"
            yield Figure(f"{kind}: first step of the process, ms", by_hand(place))
            yield Figure(f"{kind}: first step, same thread again, ms", by_hand(place))
            yield Figure(f"{kind}: first step, a new thread, ms", in_thread(by_hand, place))
            yield Figure(f"{kind}: first step, another new thread, ms", in_thread(by_hand, place))
            yield Figure(f"{kind}: first step of a run, ms", by_flowdp(place))
            yield Figure(f"{kind}: first step of the next run, ms", by_flowdp(place))
    finally:
        torch.backends.cudnn.benchmark = before
