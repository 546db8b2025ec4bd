"""Launches of many small kernels by several ranks of one card, beside as many processes.

The variants and the model are those of `bench.micro.launch`. Threads share the interpreter's lock, so eager
ranks may be slower together than one alone; a launch limit, captured steps and torch.compile help.
Processes on one card have no common lock, and the card runs one of them at a time, in slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median

from bench.gpu.part import Figure, Finding, Note, Place
from bench.micro import launch
from bench.micro.launch import PROCESSES, VARIANTS, Task, words

__all__ = ["measure", "measure_compiled"]

Cases = Mapping[int, Sequence[str]]

ONE, CAPTURED = "flowdp, one launches", "flowdp, captured"
ON_CARD: Cases = {
    1: (PROCESSES, "flowdp", CAPTURED),
    4: (PROCESSES, "flowdp", ONE, CAPTURED),
    8: (PROCESSES, "flowdp", ONE),
    2: (PROCESSES, "flowdp"),
}
"""Variants by the number of ranks, the most telling numbers first. Each takes some 15 s to warm up."""

COMPILED = (PROCESSES, "processes, compiled", "flowdp", "flowdp, compiled")


def measure(place: Place) -> Iterator[Finding]:
    tiny: Cases = dict.fromkeys((1, 2), (PROCESSES, "flowdp"))
    cases = place.pick(ON_CARD, tiny)
    yield from rates(place, "launches", cases, layers=place.pick(12, 2))


def measure_compiled(place: Place) -> Iterator[Finding]:
    """Compiled steps; few layers, for each rank compiles its own."""
    place.needs_cuda("torch.compile against launches")
    yield from rates(place, "compiled", {2: COMPILED}, layers=4)


def rates(place: Place, part: str, cases: Cases, *, layers: int) -> Iterator[Finding]:
    """Steps per second of all ranks, in turns of one second; the findings of each number of ranks at once."""
    task = Task(place.device.type, layers=layers, width=32, length=8)
    alone: dict[str, float] = {}
    is_measured = False
    for count, names in cases.items():
        with ExitStack() as stack:
            sides = launch.open_sides(stack, task, names, (count,))
            seen = launch.measure(sides, place.pick(3, 1), place.pick(0.7, 0.2))
        for name in names:
            if name not in [variant for variant, _ in seen] and not VARIANTS[name].missing:
                yield Note(f"{part}: {name}, {words(count)} failed; see the log")
        found = {name: median(figures) for (name, _), figures in seen.items()}
        is_measured = is_measured or bool(found)
        for name, rate in found.items():
            yield Figure(f"{part}: {name}, {words(count)}, steps/s", rate)
            if count == 1:
                alone[name] = rate
            elif name in alone:
                yield Figure(f"{part}: {name}, {words(count)}, times 1 rank", rate / alone[name])
            if name != PROCESSES and PROCESSES in found:
                yield Figure(f"{part}: {name}, {words(count)}, times processes", rate / found[PROCESSES])
    if not is_measured:
        raise RuntimeError("no variant could be measured")
