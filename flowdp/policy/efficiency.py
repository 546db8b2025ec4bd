"""Efficiency of a run: the throughput of its devices in their steps, the throughput reached, and the rest.

A device that does nothing but steps has a rate of its own: its samples over its time in steps. The ideal is
the sum of these rates. Every millisecond that a device spends otherwise costs as many samples as it would
have trained meanwhile; so the losses of all devices and the samples reached add up to the ideal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape

from flowdp.policy.formats import Table, format_duration

__all__ = ["PARTS", "Activity", "DeviceEfficiency", "EfficiencyReport", "RankTimes", "efficiency_of"]


class Activity(StrEnum):
    """Use that a rank makes of its time."""

    STEP = "step"
    DATA = "data wait"
    GATE = "gate wait"
    AVERAGE = "averaging"
    EVALUATE = "evaluation"
    SAVE = "checkpoint"
    HEAL = "healing"
    IDLE = "no orders"
    TRANSFER = "transfer"
    """Batches brought to the device, beside the steps: gathered in pinned memory, and copied."""


@dataclass(slots=True)
class RankTimes:
    """Time of a rank since its thread began, by its use.

    Attributes:
        ms: Milliseconds by activity; what is missing to `wall_ms` went to the interpreter.
        samples: Samples trained.
        steps: Steps.
        wall_ms: Time since the run began.
    """

    ms: dict[Activity, float] = field(default_factory=dict)
    samples: int = 0
    steps: int = 0
    wall_ms: float = 0.0

    def add(self, activity: Activity, ms: float) -> None:
        """Count some time."""
        self.ms[activity] = self.ms.get(activity, 0.0) + ms


PARTS: Mapping[str, tuple[Activity, ...]] = {
    "training": (Activity.STEP,),
    "slower device": (Activity.GATE,),
    "averaging": (Activity.AVERAGE, Activity.HEAL),
    "data": (Activity.DATA,),
    "interpreter": (),
    "evaluation": (Activity.EVALUATE,),
    "checkpoint": (Activity.SAVE,),
    "no orders": (Activity.IDLE,),
}
"""Parts of a device's time in the order of the report, and the activities that make them up."""

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class DeviceEfficiency:
    """Time of one device.

    Attributes:
        device: Its name, with the rank where several ranks have it.
        ideal: Samples per second in its steps; 0 if it took none.
        reached: Samples per second of the run.
        parts: Fractions of the run's time by part; they sum to 1.
    """

    device: str
    ideal: float
    reached: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EfficiencyReport:
    """Throughput that the devices of a run could reach by themselves, the one reached, and the losses.

    "training" is time in steps; "slower device" the wait for other ranks; "interpreter" the wait for
    Python's lock, and the loop around the steps; "no orders" the time before the first step and behind the
    last, and pauses. On a CUDA device "data" is all time between two steps, also where its host was late to
    launch. The rate of a device is measured in this run, beside the others: if they slow each other
    down within a step, by sharing memory or cores, that is part of it.

    Attributes:
        wall_ms: Time of the run so far.
        ideal: Sum of the devices' own rates, in samples per second.
        reached: Samples of all devices per second of the run.
        parts: Fractions of the ideal by part; they sum to 1, and "training" is the efficiency.
        devices: One for each rank.
        captured: Ranks whose steps run as CUDA graphs.
    """

    wall_ms: float
    ideal: float
    reached: float
    parts: Mapping[str, float]
    devices: tuple[DeviceEfficiency, ...]
    captured: int = 0

    @property
    def efficiency(self) -> float:
        """Throughput reached over the ideal; 0 without a step."""
        return self.parts["training"]

    def __str__(self) -> str:
        return f"{self.headline}\n\n{self.table}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.headline)}</p>{self.table._repr_html_()}"

    @property
    def table(self) -> Table:
        """Parts of all devices together and of each."""
        columns = (self.parts, *(device.parts for device in self.devices))
        return Table(
            ("", "all", *(device.device for device in self.devices)),
            [(part, *(f"{100 * parts[part]:.1f} %" for parts in columns)) for part in PARTS],
        )

    @property
    def headline(self) -> str:
        """The report in one line."""
        captured = f", {self.captured} of {len(self.devices)} with captured steps" if self.captured else ""
        return (
            f"{self.reached:,.0f} of {self.ideal:,.0f} samples/s ({100 * self.efficiency:.1f} %) in "
            f"{format_duration(self.wall_ms)}{captured}"
        )


def efficiency_of(ranks: Sequence[RankTimes], names: Sequence[str]) -> EfficiencyReport:
    """Attribute the time of a run.

    Args:
        ranks: Times of each rank. Shape (world_size,).
        names: Names of their devices. Shape (world_size,).
    """
    wall_ms = max((times.wall_ms for times in ranks), default=0.0)
    devices = tuple(_device(times, name, wall_ms) for times, name in zip(ranks, names, strict=True))
    ideal, reached = sum(device.ideal for device in devices), sum(device.reached for device in devices)
    parts = {
        part: sum(device.ideal * device.parts[part] for device in devices) / ideal if ideal else 0.0
        for part in PARTS
    }
    return EfficiencyReport(wall_ms, ideal, reached, parts, devices)


def _device(times: RankTimes, name: str, wall_ms: float) -> DeviceEfficiency:
    ms = {part: sum(times.ms.get(activity, 0.0) for activity in PARTS[part]) for part in PARTS}
    # A rank that has left, or begun later, has no orders in the rest of the run.
    ms["no orders"] += wall_ms - times.wall_ms
    ms[INTERPRETER] = max(0.0, wall_ms - sum(ms.values()))
    whole_ms = sum(ms.values())  # beyond the wall time by errors of measurement alone
    busy_ms = ms["training"]
    return DeviceEfficiency(
        name,
        ideal=1e3 * times.samples / busy_ms if busy_ms else 0.0,
        reached=1e3 * times.samples / whole_ms if whole_ms else 0.0,
        parts={part: share / whole_ms if whole_ms else 0.0 for part, share in ms.items()},
    )
