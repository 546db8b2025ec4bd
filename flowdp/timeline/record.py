"""The record of a run in time: spans of its ranks, its rounds, events and samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from flowdp.policy.efficiency import Activity, EfficiencyReport
from flowdp.policy.formats import format_metric
from flowdp.protocol.commands import (
    Command,
    EpochEnded,
    EvaluationEnded,
    LeaveGate,
    Paused,
    Quarantined,
    RoundAbandoned,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.messages import Throttle
from flowdp.timeline.rows import Matrix, Rows
from flowdp.timeline.sampler import GpuReading, HostReading, Sampler
from flowdp.timeline.spans import ORDER, RankSpans, Span

__all__ = ["TimelineEvent", "TimelineRecord", "TimelineRound", "TimelineSample"]

ROUNDS = 4096
"""Rounds that are kept; of more, neighbours are merged."""

EVENTS = 4096
"""Newest events of each kind that are kept."""

SAMPLES = 4096
"""Samples that are kept; of more, neighbours are merged."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An event of a run.

    Attributes:
        at_ms: Time since the run began.
        kind: "epoch", "evaluation" (by steps), "anchor", "shares", "throttle", "guard", "checkpoint",
            "pause", "rank", or "round" of one that was no ordinary one.
        text: Description.
        rank: The rank concerned; None: all.
    """

    at_ms: float
    kind: str
    text: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TimelineRound:
    """Numbers of a round, or of several that were merged.

    Attributes:
        at_ms: Its end, since the run began.
        wall_ms: From its beginning to its end.
        rounds: How many.
        global_step: Steps of all ranks after it.
        loss: Mean of the finite losses; NaN without any.
        lr: Learning rate of the first group.
        anchor: Steps of the slowest rank that the cadence aimed at.
        drift: Largest; NaN where it was not measured.
        samples: Samples per rank. Shape (world_size,).
    """

    at_ms: float
    wall_ms: float
    rounds: int
    global_step: int
    loss: float
    lr: float
    anchor: int
    drift: float
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """Use of the machine over half a second; over a longer time, if several were merged.

    Attributes:
        at_ms: Time since the run began.
        cpu: Cores that this process used: 1.0 is one core.
        ram_bytes: Resident memory of this process; NaN where it cannot be read.
        gpus: Use of each CUDA device, in the order of `Timeline.gpus`.
    """

    at_ms: float
    cpu: float
    ram_bytes: float
    gpus: tuple[GpuReading, ...]


class TimelineRecord:
    """Record of a run: spans of the ranks, rounds, events and samples, in bounded memory.

    Of a long run neighbours are merged, so that it is there from its beginning to its end; counts and times
    stay exact.

    Args:
        devices: Names of the devices, one per rank.
        gpus: CUDA devices that are sampled: their names and UUIDs.

    Attributes:
        devices: As given.
        gpus: Their names.
        ranks: Recorder of each rank.

    Threads:
        Ranks and the coordinator add; any thread reads.
    """

    def __init__(self, devices: Sequence[str], gpus: Mapping[str, str] | None = None) -> None:
        self.devices = tuple(devices)
        uuids = {} if gpus is None else gpus
        self.gpus = tuple(uuids)
        self.ranks = tuple(RankSpans() for _ in devices)
        self._begun_s = perf_counter()
        self._ended_s: float | None = None
        self._rounds = Rows(11 + len(devices), ROUNDS, _merged_rounds)
        self._samples = Rows(4 + 3 * len(uuids), SAMPLES, _merged_samples)
        self._sampler = Sampler(self.sample, list(uuids.values()))
        self._events: dict[str, deque[TimelineEvent]] = {}
        self._anchor = 0
        self._report: Callable[[], EfficiencyReport] | None = None

    # ------------------------------------------------------------------ reading
    @property
    def wall_ms(self) -> float:
        """Time since the run began, until its end."""
        return self._since(perf_counter() if self._ended_s is None else self._ended_s)

    @property
    def spans(self) -> list[Span]:
        """All spans, by rank and activity, in the order of time."""
        return [
            Span(rank, activity, start, end, busy, int(count))
            for rank, recorder in enumerate(self.ranks)
            for activity in ORDER
            for start, end, busy, count in self.table(recorder, activity).tolist()
        ]

    def table(self, recorder: RankSpans, activity: Activity) -> Matrix:
        """Spans of one activity of a rank as rows of (start, end, busy, count), in milliseconds.

        Shape (spans, 4).
        """
        rows = recorder.read(activity)
        rows[:, :2] -= self._begun_s
        rows[:, :3] *= 1e3
        return rows

    @property
    def rounds(self) -> list[TimelineRound]:
        """All rounds, in their order."""
        return [self._round(row) for row in self._rounds.read().tolist()]

    @property
    def events(self) -> list[TimelineEvent]:
        """The events, in the order of time; of each kind the newest 4,096."""
        found = [event for kept in list(self._events.values()) for event in list(kept)]
        return sorted(found, key=lambda event: event.at_ms)

    @property
    def samples(self) -> list[TimelineSample]:
        """Use of the machine, twice a second."""
        return [self._sample(row) for row in self._samples.read().tolist()]

    def report(self) -> EfficiencyReport | None:
        """The run's efficiency report; None of a timeline without a run."""
        return None if self._report is None else self._report()

    # ------------------------------------------------------------------ recording
    def start(self) -> None:
        """Start the thread that samples the machine; `close` ends it."""
        self._sampler.start()

    def begin(self, report: Callable[[], EfficiencyReport]) -> None:
        """Begin the run: times count from here.

        Args:
            report: Makes the run's efficiency report.
        """
        self._begun_s, self._report = perf_counter(), report

    def close(self) -> None:
        """End the run, and the sampling."""
        self._sampler.close()
        if self._ended_s is None:
            self._ended_s = perf_counter()

    def note(self, command: Command) -> None:
        """Record a command of the coordinator.

        Threads:
            The coordinator's.
        """
        match command:
            case RoundEnded():
                self._note_round(command)
            case EpochEnded(metrics):
                loss = "" if metrics.loss is None else f", loss {format_metric(metrics.loss)}"
                self._event("epoch", f"epoch {metrics.epoch + 1}{loss}")
            case EvaluationEnded():
                self._event("evaluation", str(command))
            case Send(rank, Throttle(limit, reason)):
                self._event("throttle", f"held at step {limit}: {reason}", rank)
            case Save(version=int(version)):
                self._event("checkpoint", f"checkpoint {version}")
            case Quarantined(rank):
                self._event("guard", "NaN or infinite parameters", rank)
            case RoundAbandoned(round, missing):
                self._event("round", f"round {round} is given up: no snapshot of ranks {missing}")
            case LeaveGate(rank):
                self._event("rank", "the others go on without it", rank)
            case Paused(value):
                self._event("pause", "paused" if value else "continued")

    def sample(self, host: HostReading, gpus: Sequence[GpuReading]) -> None:
        """Record the use of the machine.

        Threads:
            The sampler's.
        """
        numbers = (number for gpu in gpus for number in (gpu.utilisation, gpu.memory_bytes, gpu.total_bytes))
        self._samples.add((perf_counter(), 1.0, host.cpu, host.ram_bytes, *numbers))

    def _note_round(self, ended: RoundEnded) -> None:
        loss, weight = (0.0, 0) if ended.loss is None else (ended.loss, sum(ended.samples))
        if not math.isfinite(loss):
            loss, weight = 0.0, 0
        drift = math.nan if ended.drift is None else ended.drift
        now_s, steps = perf_counter(), sum(ended.steps)
        row = (now_s, ended.wall_ms, ended.rounds, ended.global_step, loss * weight, weight, ended.lr)
        self._rounds.add((*row, ended.anchor, drift, ended.sync_ms * ended.rounds, steps, *ended.samples))
        if ended.anchor != self._anchor:
            before = f"{self._anchor} → " if self._anchor else ""
            self._event("anchor", f"anchor {before}{ended.anchor}")
            self._anchor = ended.anchor
        if ended.share:
            self._event("shares", "shares " + " ".join(f"{100 * share:.0f} %" for share in ended.share))
        if ended.reason:
            self._event("round", f"round {ended.round}: {ended.reason}")

    def _event(self, kind: str, text: str, rank: int | None = None) -> None:
        kept = self._events.setdefault(kind, deque(maxlen=EVENTS))
        kept.append(TimelineEvent(self._since(perf_counter()), kind, text, rank))

    def _since(self, at_s: float) -> float:
        return (at_s - self._begun_s) * 1e3

    def _round(self, row: Sequence[float]) -> TimelineRound:
        at_s, wall_ms, rounds, step, loss, weight, lr, anchor, drift, _, _, *samples = row
        return TimelineRound(
            at_ms=self._since(at_s),
            wall_ms=wall_ms,
            rounds=int(rounds),
            global_step=int(step),
            loss=loss / weight if weight else math.nan,
            lr=lr,
            anchor=int(anchor),
            drift=drift,
            samples=tuple(map(int, samples)),
        )

    def _sample(self, row: Sequence[float]) -> TimelineSample:
        at_s, count, cpu, ram, *gpus = row
        readings = tuple(
            GpuReading(utilisation / count, memory, total)
            for utilisation, memory, total in zip(gpus[0::3], gpus[1::3], gpus[2::3], strict=True)
        )
        return TimelineSample(self._since(at_s), cpu / count, ram, readings)


def _merged_rounds(one: Sequence[Any], following: Sequence[Any]) -> tuple[Any, ...]:
    _, wall, rounds, _, loss, weight, _, _, drift, sync, steps, *samples = one
    at, wall_2, rounds_2, step, loss_2, weight_2, lr, anchor, drift_2, sync_2, steps_2, *samples_2 = following
    sums = (steps + steps_2, *(a + b for a, b in zip(samples, samples_2, strict=True)))
    head = (at, wall + wall_2, rounds + rounds_2, step, loss + loss_2, weight + weight_2)
    return *head, lr, anchor, np.fmax(drift, drift_2), sync + sync_2, *sums


def _merged_samples(one: Sequence[Any], following: Sequence[Any]) -> tuple[Any, ...]:
    """Mean use over both times, as sums and a count; the larger memory."""
    merged = [following[0], one[1] + following[1], one[2] + following[2], np.fmax(one[3], following[3])]
    for at in range(4, len(one), 3):
        merged += [one[at] + following[at], np.fmax(one[at + 1], following[at + 1]), following[at + 2]]
    return tuple(merged)
