"""Objects that the threads of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowdp.checkpoint.writer import Saver
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.base import Collective
from flowdp.data.source import Source
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.failures import Failures
from flowdp.engine.requests import Requests
from flowdp.network.channel import Channel
from flowdp.network.team import Team
from flowdp.observe.records import Records
from flowdp.replica.joint_step import JointStep
from flowdp.replica.span_step import SpanStep
from flowdp.threads.gate import Gate
from flowdp.timeline.timeline import Timeline

__all__ = ["MeetingPoint", "Services"]


@dataclass(frozen=True, kw_only=True)
class Services:
    """Objects that are there before an engine, which uses them and closes them at its end.

    Attributes:
        team: The ranks of all machines.
        saver: Writer of checkpoints, and keeper of the best model.
        channel: Messages between the machines; None: there is one machine.
        evaluator: Evaluates the averaged model; None: there are no evaluations.
        timeline: Recorder of spans and events; None: there is none.
        step_callbacks: Called after each step of each rank, in its thread, with its worker and its loss.
        close_observer: Waits for the callbacks, for so many seconds at most; False: one does not return.
    """

    team: Team
    source: Source
    records: Records
    failures: Failures
    requests: Requests
    saver: Saver
    channel: Channel | None = None
    evaluator: Evaluator | None = None
    timeline: Timeline | None = None
    step_callbacks: Sequence[Callable[[CurrentWorker, Tensor | None], object]] = ()
    close_observer: Callable[[float | None], bool] = lambda _: True

    @property
    def sources(self) -> list[Source]:
        """The datasets that are read: that of the training, and that of the evaluation if there is one."""
        return [self.source, *([] if self.evaluator is None else [self.evaluator.source])]


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Objects that average the replicas.

    Attributes:
        gate: Gate at which all ranks meet.
        collective: Averages at the gate.
        snapshots: Averages while the ranks train on; None where the policy has no such rounds.
        joint: The step that all ranks take together; None where each takes its own.
    """

    gate: Gate
    collective: Collective
    snapshots: SnapshotMean | None = None
    joint: JointStep | SpanStep | None = None
