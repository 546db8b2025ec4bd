"""The record of a run in time: spans of its ranks, its rounds, events and samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

from flowdp.policy.efficiency import Activity, EfficiencyReport
from flowdp.policy.formats import format_metric
from flowdp.policy.shares import format_shares
from flowdp.protocol.commands import (
    Command,
    EpochMetrics,
    EpochStarted,
    EvaluationEnded,
    Finish,
    LeaveGate,
    Paused,
    Quarantined,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.messages import Throttle
from flowdp.timeline.sampler import GpuReading, Sampler
from flowdp.timeline.spans import ORDER, Matrix, RankSpans, Span

__all__ = ["TimelineEvent", "TimelineRecord", "TimelineRound", "TimelineSample"]

EVENTS = 4096
"""Newest events of each kind that are kept."""

KEPT = 4096
"""Rounds and samples that are kept; of more, every second, every fourth and so on."""


T = TypeVar("T")


class _Thinned(Generic[T]):
    """Items of a run of any length, evenly thinned where there are too many.

    Threads:
        One adds; any may read.
    """

    def __init__(self) -> None:
        self.kept: list[T] = []
        self._added = 0
        self._stride = 1  # items of which one is kept

    def add(self, item: T) -> None:
        """Add an item."""
        if self._added % self._stride == 0:
            self.kept.append(item)
        self._added += 1
        if len(self.kept) >= KEPT:
            self.kept = self.kept[::2]
            self._stride *= 2


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An event of a run.

    Attributes:
        at_ms: Time since the run began.
        kind: "epoch", "evaluation" (by steps), "round length", "shares", "held", "checkpoint",
            "pause", "rank", "end", or "round" of one that was no ordinary one.
        text: Description.
        rank: The rank concerned; None: all.
    """

    at_ms: float
    kind: str
    text: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TimelineRound:
    """Numbers of a round, or of several that one order had.

    Attributes:
        at_ms: Its end, since the run began.
        wall_ms: From its beginning to its end.
        rounds: How many.
        global_step: Steps of all ranks after it.
        loss: Mean loss; NaN where it is not finite, or there is none.
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

    def rate(self, rank: int) -> float:
        """Samples per second of a rank; NaN of a round that took no time."""
        return 1e3 * self.samples[rank] / self.wall_ms if self.wall_ms > 0 else math.nan


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """Use of the machine over half a second.

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

    Of a long run neighbouring spans are merged, and rounds and samples left out, so that it is there from its
    beginning to its end; the spans' counts and times stay exact.

    Args:
        devices: Names of the devices, one per rank.
        gpus: CUDA devices that are sampled: their names and UUIDs.
        first_rank: Rank of the first device; commands name ranks of other machines, too.
        about: Line about the run.

    Attributes:
        devices: As given.
        about: As given.
        gpus: Their names.
        ranks: Recorder of each rank.

    Threads:
        Ranks and the coordinator add; any thread reads.
    """

    def __init__(
        self,
        devices: Sequence[str],
        gpus: Mapping[str, str] | None = None,
        first_rank: int = 0,
        about: str = "",
    ) -> None:
        self.devices = tuple(devices)
        self.about = about
        self._here = range(first_rank, first_rank + len(devices))
        uuids = {} if gpus is None else gpus
        self.gpus = tuple(uuids)
        self.ranks = tuple(RankSpans() for _ in devices)
        self._begun_s = perf_counter()
        self._ended_s: float | None = None
        self._rounds = _Thinned[TimelineRound]()
        self._samples = _Thinned[TimelineSample]()
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
        return list(self._rounds.kept)

    @property
    def events(self) -> list[TimelineEvent]:
        """The events, in the order of time; of each kind the newest 4,096."""
        events = [event for kept in list(self._events.values()) for event in list(kept)]
        return sorted(events, key=lambda event: event.at_ms)

    @property
    def samples(self) -> list[TimelineSample]:
        """Use of the machine, twice a second."""
        return list(self._samples.kept)

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
            case EpochStarted(epoch):
                self._event("epoch", f"epoch {epoch + 1} begins")
            case EpochMetrics() as metrics:
                loss = "" if metrics.loss is None else f", loss {format_metric(metrics.loss)}"
                self._event("epoch", f"epoch {metrics.epoch + 1}{loss}")
            case EvaluationEnded():
                self._event("evaluation", str(command))
            case Send(rank, Throttle(limit, reason)):
                self._event("held", f"waits at step {limit}: {reason}", rank)
            case Save(version=int(version)):
                self._event("checkpoint", f"checkpoint {version}")
            case Quarantined(rank):
                self._event("rank", "NaN or inf parameters: it copies those of another device", rank)
            case LeaveGate(rank):
                self._event("rank", "the others go on without it", rank)
            case Paused(value):
                self._event("pause", "paused" if value else "continued")
            case Finish():
                self._event("end", str(command).partition("\n")[0])

    def sample(self, cpu: float, ram_bytes: float, gpus: Sequence[GpuReading]) -> None:
        """Record the use of the machine.

        Threads:
            The sampler's.
        """
        at_ms = self._since(perf_counter())
        self._samples.add(TimelineSample(at_ms, cpu, ram_bytes, tuple(gpus)))

    def _note_round(self, ended: RoundEnded) -> None:
        here = slice(self._here.start, self._here.stop)
        self.add_round(
            TimelineRound(
                at_ms=self._since(perf_counter()),
                wall_ms=ended.wall_ms,
                rounds=ended.rounds,
                global_step=ended.global_step,
                loss=math.nan if ended.loss is None or not math.isfinite(ended.loss) else ended.loss,
                lr=ended.lr,
                anchor=ended.anchor,
                drift=math.nan if ended.drift is None else ended.drift,
                samples=ended.samples[here],
            ),
            ended.share[here],
        )
        if ended.reason:
            self._event("round", f"round {ended.round}: {ended.reason}")

    def add_round(self, done: TimelineRound, share: Sequence[float] = ()) -> None:
        """Record a round.

        Args:
            done: Its numbers.
            share: Shares of the ranks from now on, where they have changed; else empty. Shape (world_size,).

        Threads:
            The coordinator's; in a loop that the user owns, that loop's.
        """
        self._rounds.add(done)
        if done.anchor != self._anchor:
            before = f"{self._anchor} → " if self._anchor else ""
            steps = f"{done.anchor} step{'s' * (done.anchor != 1)}"
            self._event("round length", f"{before}{steps} of the slowest device")
            self._anchor = done.anchor
        if share:
            self._event("shares", "shares " + format_shares(share))

    def _event(self, kind: str, text: str, rank: int | None = None) -> None:
        if rank is not None and rank not in self._here:
            return
        rank = None if rank is None else rank - self._here.start
        kept = self._events.setdefault(kind, deque(maxlen=EVENTS))
        kept.append(TimelineEvent(self._since(perf_counter()), kind, text, rank))

    def _since(self, at_s: float) -> float:
        return (at_s - self._begun_s) * 1e3
