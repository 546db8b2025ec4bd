"""Tasks of a rank at a barrier: evaluate, save its state, copy another rank's replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowdp.checkpoint.rank_state import capture
from flowdp.checkpoint.writer import Saver
from flowdp.engine.evaluation import Evaluator
from flowdp.errors import ProtocolError
from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluated,
    ReplicaCopied,
    SaveState,
    Settle,
    StateSaved,
)
from flowdp.replica.replica import Replica

__all__ = ["BarrierTasks"]


class BarrierTasks:
    """Executor of one rank's barrier tasks: those for which it has a saver and an evaluator.

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
    ) -> None:
        self._replica = replica
        self._replicas = replicas
        self._saver = saver
        self._evaluator = evaluator
        self._rank = rank

    def name(self, task: BarrierTask) -> str:
        """Describe a task for messages."""
        match task:
            case Evaluate(epoch, _, None):
                return f"evaluates after epoch {epoch}"
            case Evaluate(_, _, global_step):
                return f"evaluates at step {global_step}"
            case SaveState():
                return "saves its state"
            case CopyReplica():
                return f"copies the replica of rank {task.donor}"
            case Settle():
                return "brings in the mean of all machines"

    def serve(
        self, task: BarrierTask, wait: Callable[[], bool], moved: Callable[[], None]
    ) -> Evaluated | StateSaved | ReplicaCopied:
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
                    return self._evaluator.run(self._rank, self._replica, wait, moved)
            case SaveState() if self._saver is not None:
                self._saver.put(self._rank, capture(self._replica, shared=task.model == self._rank))
                return StateSaved(self._rank)
            case CopyReplica():
                self._replica.copy_from(self._replicas[task.donor])
                self._replica.lane.drain()  # the donor may train on as soon as the coordinator hears
                return ReplicaCopied(self._rank)
        raise ProtocolError(f"rank {self._rank} cannot do {task}")
