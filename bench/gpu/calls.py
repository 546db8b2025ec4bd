"""Calls of `setup` captured and eager, beside a loop by hand: time of a step, and of the host in each part.

The models are those of `bench.gpu.peers`, with their data on the card and torch's fused AdamW, so hardly
anything but the calls takes the host's time; and then with a DataLoader, as most loops have one. A second
loop waits for the device before each part, and so times the host alone; a third has a clock around the
functions of a captured call, some 0.3 us each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, product, repeat
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import flowdp
from bench.gpu.host import Stopwatch, replaced
from bench.gpu.part import Figure, Finding, Note, Place
from bench.gpu.peers import Batches, Work, copied, fused, resident, works
from flowdp.graphs.call_graphs import CallGraphs
from flowdp.graphs.captured_call import CapturedCall
from flowdp.graphs.guards import Guards

WARM_UP = 80
"""Steps before the timed ones: graphs are recorded, and compared at growing distances."""

PARTS: Mapping[str, tuple[type, str]] = {
    "call": (CapturedCall, "__call__"),
    "form": (CapturedCall, "_form_of"),
    "guards": (Guards, "changed"),
    "forward of the graphs": (CallGraphs, "forward"),
    "backward of the graphs": (CallGraphs, "backward"),
}
"""Functions of a captured call: class and method."""

SOURCES: Mapping[str, Callable[[Place, Work], Batches]] = {"": resident, ", DataLoader": copied}
"""Where batches come from."""

SIDES: Mapping[str, bool | None] = {
    "by hand": None,
    "setup, capture=False": False,
    "setup, captured": True,
}
"""Option `capture` of `setup`; None: a loop by hand."""


@contextmanager
def called(place: Place, work: Work, capture: bool | None) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """A new model on the card, as it is called, and its optimizer.

    Args:
        place: Its device.
        work: The workload.
        capture: Of `setup`; None: the model itself.
    """
    torch.manual_seed(0)
    model: nn.Module = work.make().to(place.device)
    optimizer = fused(model.parameters())
    if capture is None:
        yield model, optimizer
        return
    # A rehearsal on the CPU captures nothing.
    option = place.pick(capture, False)
    with flowdp.setup(model, optimizer, devices=[place.device], capture=option, progress=False) as dp:
        yield dp, optimizer


def steps(
    place: Place, work: Work, epoch: Batches, capture: bool | None, count: int, at: Callable[[str], None]
) -> None:
    """Train for so many steps.

    Args:
        place: Its device.
        work: The workload.
        epoch: Makes the batches of an epoch.
        capture: See `called`.
        count: Number of steps.
        at: Is told of the begin of each part: "data", "forward", "backward", "rest", and of the "end".
    """
    batches = chain.from_iterable(epoch() for _ in repeat(None))
    with called(place, work, capture) as (model, optimizer):
        for _ in range(count):
            at("data")
            batch = next(batches)
            at("forward")
            loss = work.loss(model, batch)
            at("backward")
            loss.backward()
            at("rest")
            optimizer.step()
            optimizer.zero_grad()
            at("end")


def step_ms(place: Place, work: Work, epoch: Batches, capture: bool | None) -> float:
    """Milliseconds per step behind the warm-up."""
    count, ends, start_s = place.pick(200, 4), 0, 0.0
    warm = place.pick(WARM_UP, 1)

    def at(part: str) -> None:
        nonlocal ends, start_s
        if part == "end":
            ends += 1
            if ends == warm:
                place.wait()
                start_s = perf_counter()

    steps(place, work, epoch, capture, count + warm, at)
    place.wait()
    return (perf_counter() - start_s) * 1e3 / count


def host_us(place: Place, work: Work, epoch: Batches, capture: bool | None) -> dict[str, float]:
    """Median microseconds of the host for each part of a step, begun when the device has nothing to do."""
    seen: dict[str, list[float]] = {}
    last: tuple[str, float] | None = None

    def at(part: str) -> None:
        nonlocal last
        now_s = perf_counter()
        if last is not None:
            seen.setdefault(last[0], []).append(1e6 * (now_s - last[1]))
        place.wait()
        last = None if part == "end" else (part, perf_counter())

    warm = place.pick(WARM_UP, 1)
    steps(place, work, epoch, capture, place.pick(200, 4) + warm, at)
    return {part: median(times[warm:]) for part, times in seen.items()}


def parts_us(place: Place, work: Work, epoch: Batches) -> dict[str, float]:
    """Microseconds per step in the functions of captured calls, those that they call included."""
    count, warm = place.pick(200, 4), place.pick(WARM_UP, 1)
    watch, ends = Stopwatch(), 0

    def at(part: str) -> None:
        nonlocal ends
        ends += part == "end"
        if ends == warm:
            watch.seconds.update(dict.fromkeys(watch.seconds, 0.0))

    with ExitStack() as stack:
        for name, (owner, method) in PARTS.items():
            stack.enter_context(replaced(owner, method, watch.timed(name, getattr(owner, method))))
        steps(place, work, epoch, True, count + warm, at)
    return {name: seconds * 1e6 / count for name, seconds in watch.seconds.items()}


def measure(place: Place) -> Iterator[Finding]:
    # The short ones first: a run may be cut.
    for work, (source, batches) in product(works(place), SOURCES.items()):
        epoch, name = batches(place, work), f"calls, {work.name}{source}"
        rounds = [
            [step_ms(place, work, epoch, capture) for capture in SIDES.values()]
            for _ in range(place.pick(2, 1))
        ]
        for (side, capture), times in zip(SIDES.items(), zip(*rounds, strict=True), strict=True):
            yield Figure(f"{name}, {side}: ms", median(times))
            for part, us in host_us(place, work, epoch, capture).items():
                yield Figure(f"{name}, {side}: host, {part}, us", us)
        yield Note(f"{name}: parts of a captured call, with clocks")
        for part, us in parts_us(place, work, epoch).items():
            yield Figure(f"{name}, captured: {part}, us", us)
