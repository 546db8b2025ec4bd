"""Arguments, results and timers of a part of `bench.gpu`.

A part is a function of a `Place`, so the same code runs on a CPU device with tiny sizes: a rehearsal finds
errors before a GPU is at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from bench.harness import Comparison
from flowdp.device.streams import HostLane, Lane, open_lanes

__all__ = [
    "Clock",
    "Figure",
    "Finding",
    "Findings",
    "Measure",
    "Note",
    "Place",
    "Skipped",
    "lanes_of",
    "occupy",
    "timed_ms",
]

T = TypeVar("T")

AHEAD_CYCLES = 1_000_000


@dataclass(frozen=True)
class Place:
    """The device on which a part runs.

    Attributes:
        device: The device.
    """

    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether the device is CUDA; it is not in a rehearsal."""
        return self.device.type == "cuda"

    def pick(self, full: T, tiny: T) -> T:
        """Return the first on a GPU, the second in a rehearsal."""
        return full if self.is_cuda else tiny

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def needs_cuda(self, what: str) -> None:
        """Raise unless the device is CUDA.

        Raises:
            Skipped: It is not.
        """
        if not self.is_cuda:
            raise Skipped(f"{what} needs a CUDA device")


class _Rehearsed(HostLane):
    """A CPU presented as a device with streams, whose work runs on it in order."""

    is_async = True


def lanes_of(devices: Sequence[torch.device]) -> list[Lane]:
    """A lane per rank, as in a run; in a rehearsal with streams, too."""
    if all(device.type == "cpu" for device in devices):
        return [_Rehearsed(device) for device in devices]
    return open_lanes(devices)


class Skipped(Exception):
    """Raised with a reason by a part that cannot be measured here, wholly or from here on."""


@dataclass(frozen=True)
class Figure:
    """A number; its name ends in the unit."""

    name: str
    value: float


@dataclass(frozen=True)
class Note:
    """A line of text."""

    text: str


Finding = Figure | Comparison | Note
Measure = Callable[[Place], Iterator[Finding]]


@dataclass
class Findings:
    """Results of parts, written to a file line by line as they come.

    Attributes:
        figures: Figures by name.
        comparisons: Comparisons in order.
        notes: Notes in order.
    """

    figures: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        if isinstance(finding, Figure):
            self.figures[finding.name] = finding.value
        elif isinstance(finding, Note):
            self.notes.append(finding.text)
        else:
            self.comparisons.append(finding)

    @staticmethod
    def line(finding: Finding) -> str:
        """A finding as a line of JSON."""
        return json.dumps({"kind": type(finding).__name__, **vars(finding)}) + "\n"

    def add_line(self, line: str) -> None:
        """Add a line written by `line`."""
        fields: dict[str, Any] = json.loads(line)
        kind = fields.pop("kind")
        if kind == "Comparison":
            for name in ("names", "a", "b"):
                fields[name] = tuple(fields[name])
            self.add(Comparison(**fields))
        else:
            self.add(Figure(**fields) if kind == "Figure" else Note(**fields))


class Clock:
    """Times steps from inside: called at the start of each, mostly by the loss function.

    Args:
        place: Its device is awaited at both ends, so that no work is left out or counted twice.
        steps: Number of timed steps.
        warmup: Number of steps before them.
    """

    def __init__(self, place: Place, steps: int, warmup: int = 20) -> None:
        self._place = place
        self._steps = steps
        self.calls = steps + warmup + 1  # the last call ends the last timed step
        self._left = self.calls
        self._start_s = self._stop_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def tick(self) -> None:
        self._left -= 1
        if self._left in (self._steps, 0):
            self._place.wait()
        if self._left == self._steps:
            self._start_s = perf_counter()
        elif self._left == 0:
            self._stop_s = perf_counter()

    @property
    def ms(self) -> float:
        """Mean time per step."""
        if not self.is_over:
            raise RuntimeError(f"{self._left} of {self.calls} steps were never taken")
        return (self._stop_s - self._start_s) * 1e3 / self._steps


def occupy() -> None:
    """Give the current stream some 0.5 ms of work, so that the host is ahead of what it enqueues behind it.

    A device that waits for the host's launches would be timed with them.
    """
    torch.cuda._sleep(AHEAD_CYCLES)


def timed_ms(place: Place, work: Callable[[], object], *, repeats: int, warmup: int = 3) -> float:
    """Median time of `work` on the device; `work` enqueues on the current stream.

    On CUDA, the time between two events around it; each repeat is awaited before the next, and begins behind
    other work of the device.
    """
    times = []
    for _ in range(warmup + repeats):
        place.wait()
        if place.is_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            occupy()
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(float(start.elapsed_time(stop)))
        else:
            start_s = perf_counter()
            work()
            times.append((perf_counter() - start_s) * 1e3)
    return median(times[warmup:])
