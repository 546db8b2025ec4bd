"""Tasks of a rank at a barrier: evaluate, save its state, copy another rank's replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowdp.checkpoint.host_copies import PinnedBlocks
from flowdp.checkpoint.rank_state import capture, capture_generator, restore
from flowdp.checkpoint.writer import Saver
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.services import MeetingPoint
from flowdp.errors import ProtocolError
from flowdp.network.team import Team
from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluated,
    MergeMetrics,
    MetricsMerged,
    ReplicaCopied,
    SaveState,
    Settle,
    Settled,
    StateSaved,
)
from flowdp.replica.replica import Replica

__all__ = ["BarrierTasks"]


class BarrierTasks:
    """Executor of one rank's barrier tasks: those for which it has a saver and an evaluator.

    Args:
        replica: Replica of the rank.
        replicas: Replicas of all ranks of its machine.
        saver: Takes its saved states.
        evaluator: Evaluates its replica.
        rank: Rank index.
        index: Its place among the ranks of its machine; None: its rank.
        meeting: Where the ranks, and the machines, meet.

    Threads:
        The worker of the rank.
    """

    def __init__(
        self,
        replica: Replica,
        replicas: Sequence[Replica],
        saver: Saver | None,
        evaluator: Evaluator | None,
        rank: int,
        index: int | None = None,
        meeting: MeetingPoint | None = None,
    ) -> None:
        self._replica = replica
        self._replicas = replicas
        self._saver = saver
        self._evaluator = evaluator
        self._blocks = PinnedBlocks(replica.lane)
        self._rank = rank
        self._index = rank if index is None else index
        self._settle = None if meeting is None else meeting.settle
        self._team = None if meeting is None else meeting.team

    def name(self, task: BarrierTask) -> str:
        """Describe a task for messages."""
        match task:
            case Evaluate(epoch, _, None):
                return f"evaluates after epoch {epoch}"
            case Evaluate(_, _, global_step):
                return f"evaluates at step {global_step}"
            case MergeMetrics():
                return "computes the metrics of all machines"
            case SaveState():
                return "saves its state"
            case CopyReplica():
                return f"copies the replica of rank {task.donor}"
            case Settle():
                return "brings in the mean of all machines"

    def serve(
        self, task: BarrierTask, wait: Callable[[], bool], moved: Callable[[], None]
    ) -> Evaluated | MetricsMerged | StateSaved | ReplicaCopied | Settled:
        """Execute a task and return the answer to the coordinator.

        Args:
            task: Task to execute.
            wait: Blocks until there is something to look at; False: told to leave.
            moved: Called after each batch of an evaluation.

        Raises:
            Exception: Raised by the user's code.
        """
        match task:
            case Evaluate() if self._evaluator is not None:
                with self._replica.evaluated_weights():
                    found = self._evaluator.run(self._index, self._replica, wait, moved)
                return replace(found, rank=self._rank)
            case MergeMetrics() if self._evaluator is not None:
                return self._evaluator.merge(self._rank, task.number)
            case SaveState() if self._saver is not None:
                holds_model = task.model == self._rank or (task.is_best and self._is_follower_first())
                if holds_model or self._saver.keeps_ranks:
                    self._saver.put(
                        self._rank, capture(self._replica, shared=holds_model, blocks=self._blocks)
                    )
                elif self._saver.keeps_generators:
                    self._saver.put(self._rank, capture_generator(self._replica))
                return StateSaved(self._rank)
            case CopyReplica(receiver=None):
                donor = task.donor - self._rank + self._index
                self._replica.copy_from(self._replicas[donor])
                self._replica.lane.drain()  # the donor may train on as soon as the coordinator hears
                return ReplicaCopied(self._rank)
            case CopyReplica(donor, int(receiver)) if self._team is not None:
                self._copy_between(self._team, donor, receiver)
                return ReplicaCopied(self._rank)
            case Settle() if self._settle is not None:
                self._settle(self._index)
                return Settled(self._rank)
        raise ProtocolError(f"rank {self._rank} cannot do {task}")

    def _is_follower_first(self) -> bool:
        """Whether this is the first rank of a machine that follows."""
        return self._team is not None and not self._team.leads and self._index == 0

    def _copy_between(self, team: Team, donor: int, receiver: int) -> None:
        """Copy a replica to a rank of another machine."""
        assert team.machines is not None
        if self._rank == donor:
            team.machines.send(capture(self._replica, shared=True)(), team.machine_of(receiver))
            return
        state = team.machines.receive(team.machine_of(donor))
        restore(self._replica, state, state["model"], state["buffers"], state["ema"])
