"""Parts of a run: what its threads share, and what each rank has for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowdp.checkpoint.saver import Saver
from flowdp.collective.async_mean import SnapshotMean
from flowdp.collective.base import Collective
from flowdp.collective.outer import OuterMomentum
from flowdp.data.source import Feed, Source
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.failures import Failures
from flowdp.engine.rank_pool import RankPool
from flowdp.engine.requests import Requests
from flowdp.network.channel import Channel
from flowdp.network.team import Team
from flowdp.observe.records import Records
from flowdp.protocol.messages import BatchReady, Order
from flowdp.replica.joint_step import JointStep, SpanStep
from flowdp.replica.replica import Replica
from flowdp.threads.gate import Gate
from flowdp.threads.inbox import Inbox
from flowdp.timeline.timeline import Timeline

__all__ = ["Mail", "MeetingPoint", "RankParts", "Services"]

Mail = Order | BatchReady


@dataclass(frozen=True, kw_only=True)
class Services:
    """Objects that are there before an engine, which uses them and closes them at its end.

    Attributes:
        team: The ranks of all machines.
        saver: Writer of checkpoints, and keeper of the best model.
        channel: Messages between the machines; None: there is one machine.
        evaluator: Evaluates the averaged model; None: there are no evaluations.
        timeline: Recorder of spans and events; None: there is none.
        trained: The user's module, into which the run writes its result; None: it writes into none.
        tells: A line on stderr says why the run has ended, where that was not planned.
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
    trained: object = None
    tells: bool = False
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


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """The parts of one rank.

    Attributes:
        rank: Index of the rank.
        index: Its place among those of its machine.
        replica: Its replica.
        feed: Brings its batches to its device.
        inbox: Inbox of its thread.
        pool: Threads that it computes with.
        outer: Momentum of the means' outer step; CPU ranks share one. None: they are plain means.
    """

    rank: int
    index: int
    replica: Replica
    feed: Feed
    inbox: Inbox[Mail]
    pool: RankPool
    outer: OuterMomentum | None = None
