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

    STEP = "training"
    DATA = "data"
    GATE = "waiting for others"
    LEFT_OUT = "left out"
    """At the end of rounds in which the rank had no samples to train."""
    ROUNDING = "rounding"
    """At the end of rounds, as planned: no whole steps fill them on all ranks. In a timeline it is a wait."""
    GUARD = "guard"
    """As `ROUNDING`, in rounds that the divergence guard has shortened."""
    AVERAGE = "averaging"
    EVALUATE = "evaluation"
    SAVE = "checkpoint"
    HEAL = "healing"
    IDLE = "idle"
    TRANSFER = "transfer"
    """Batches brought to the device, beside the steps: gathered in pinned memory, and copied."""
    FORWARD = "forward"
    BACKWARD = "backward"
    SUM = "gradient sum"
    OWN = "your code"
    """Time between the calls of a loop of your own (`setup`), which flowdp does not see."""


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
    "training": (Activity.STEP, Activity.FORWARD, Activity.BACKWARD),
    "waiting for others": (Activity.GATE,),
    "left out": (Activity.LEFT_OUT,),
    "rounding": (Activity.ROUNDING,),
    "guard": (Activity.GUARD,),
    "averaging": (Activity.AVERAGE, Activity.HEAL, Activity.SUM),
    "data": (Activity.DATA,),
    "interpreter": (),
    "evaluation": (Activity.EVALUATE,),
    "checkpoint": (Activity.SAVE,),
    "idle": (Activity.IDLE,),
    "your code": (Activity.OWN,),
}
"""Parts of a device's time in the order of the report, and the activities that make them up. The last is of a
loop that the user owns, which has no `UNSEEN` ones."""

UNSEEN = ("left out", "rounding", "guard", "data", "evaluation", "checkpoint")

MEANINGS: Mapping[str, str] = {
    "waiting for others": 'until the last one ends its round; "cadence" has longer rounds, "async" none',
    "left out": "it had no samples, as the others are faster alone; it gets some with a larger batch_size",
    "rounding": "a round has whole steps, so some devices are done earlier; longer rounds have less of it",
    "guard": "the same in rounds that the divergence guard keeps short, as replicas move further apart",
    "averaging": "larger batches, or longer rounds, need fewer means",
    "data": "more num_workers, or tensors instead of a dataset that decodes",
    "interpreter": "waiting for Python's lock, or between two steps; larger batches have fewer of both",
    "evaluation": "EvaluationOptions(every=...) makes it rarer",
    "checkpoint": "CheckpointOptions(every=...) makes them rarer",
    "idle": "before the first step, after the last one, in a pause, or while the first device works alone",
    "your code": "loader, loss, optimizer and logs, on one thread; the devices wait for it",
}
"""Words on each part but training, for a report in which it is large."""

LARGE = 0.1
"""Part of a device's time that is explained."""


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

    "training" is time in steps; "waiting for others" that at the end of a round, until the last rank is
    there, and "left out" that of rounds in which a rank had no samples; "rounding" the wait that remains
    where all ranks are as fast as expected, because a round has whole steps, and "guard" the same in rounds
    that the divergence guard has shortened; "interpreter" the wait for Python's lock, and the loop around
    the steps; "idle" the time before the first step and behind the last, and pauses. On a CUDA device "data"
    is all time between two steps, also where its host was late to launch. The rate of a device is measured in
    this run, beside the others: if they slow each other down within a step, by sharing memory or cores, that
    is part of it.

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
        if not self.ideal:
            return self.headline
        lines = [self.headline, "", str(self.table)]
        return "\n".join([*lines, "", *self.notes] if self.notes else lines)

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(self.headline)}</p>{self.table._repr_html_()}{notes}"

    @property
    def notes(self) -> list[str]:
        """A line on each part that takes a tenth of a device's time or more, beside training."""
        largest = {
            part: max((device.parts.get(part, 0.0) for device in self.devices), default=0.0)
            for part in MEANINGS
        }
        return [f"{part}: {words}" for part, words in MEANINGS.items() if largest[part] >= LARGE]

    @property
    def table(self) -> Table:
        """Parts of all devices together and of each, without those that took nobody's time."""
        columns = (self.parts, *(device.parts for device in self.devices))
        rows = [(part, *(f"{100 * parts[part]:.1f} %" for parts in columns)) for part in self.parts]
        return Table(
            ("", "all", *(device.device for device in self.devices)),
            [row for row in rows if set(row[1:]) != {"0.0 %"}],
        )

    @property
    def headline(self) -> str:
        """The report in one line."""
        if not self.ideal:
            return f"no samples were trained in {format_duration(self.wall_ms)}"
        captured = f", {self.captured} of {len(self.devices)} with captured steps" if self.captured else ""
        return (
            f"{self.reached:,.0f} samples/s, {100 * self.efficiency:.1f} % of the speed in their steps "
            f"({self.ideal:,.0f}), in {format_duration(self.wall_ms)}{captured}"
        )


def efficiency_of(ranks: Sequence[RankTimes], names: Sequence[str]) -> EfficiencyReport:
    """Attribute the time of a run.

    Args:
        ranks: Times of each rank. Shape (world_size,).
        names: Names of their devices. Shape (world_size,).
    """
    wall_ms = max((times.wall_ms for times in ranks), default=0.0)
    is_loop = any(Activity.OWN in times.ms for times in ranks)
    shown = [part for part in PARTS if part not in (UNSEEN if is_loop else ("your code",))]
    devices = tuple(_device(times, name, wall_ms, shown) for times, name in zip(ranks, names, strict=True))
    ideal, reached = sum(device.ideal for device in devices), sum(device.reached for device in devices)
    parts = {
        part: sum(device.ideal * device.parts[part] for device in devices) / ideal if ideal else 0.0
        for part in shown
    }
    return EfficiencyReport(wall_ms, ideal, reached, parts, devices)


def _device(times: RankTimes, name: str, wall_ms: float, shown: Sequence[str]) -> DeviceEfficiency:
    ms = {part: sum(times.ms.get(activity, 0.0) for activity in PARTS[part]) for part in shown}
    # A rank that has left, or begun later, is idle in the rest of the run.
    ms["idle"] += wall_ms - times.wall_ms
    ms["interpreter"] = max(0.0, wall_ms - sum(ms.values()))
    whole_ms = sum(ms.values())  # beyond the wall time by errors of measurement alone
    busy_ms = ms["training"]
    return DeviceEfficiency(
        name,
        ideal=1e3 * times.samples / busy_ms if busy_ms else 0.0,
        reached=1e3 * times.samples / whole_ms if whole_ms else 0.0,
        parts={part: share / whole_ms if whole_ms else 0.0 for part, share in ms.items()},
    )
