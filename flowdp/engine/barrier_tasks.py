"""Tasks of a rank at a barrier: evaluate, save its state, copy another rank's replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowdp.checkpoint.host_copies import PinnedBlocks
from flowdp.collective.host import HostMean
from flowdp.engine.parts import MeetingPoint, RankParts, Services
from flowdp.errors import ProtocolError
from flowdp.policy.efficiency import Activity
from flowdp.protocol.messages import BarrierTask, CopyReplica, Evaluate, SaveState, Settle, TaskDone
from flowdp.replica.rank_state import capture, capture_generator, restore
from flowdp.replica.replica import Replica

__all__ = ["BarrierTasks", "described"]


def described(task: BarrierTask) -> tuple[str, Activity]:
    """A task in words, for messages, and the use of the time that it takes."""
    match task:
        case Evaluate(merges=True):
            return "computes the metrics of all ranks", Activity.EVALUATE
        case Evaluate(epoch, _, global_step):
            when = f"after epoch {epoch + 1}" if global_step is None else f"at step {global_step}"
            return f"evaluates {when}", Activity.EVALUATE
        case SaveState():
            return "saves its state", Activity.SAVE
        case CopyReplica():
            return f"copies the replica of rank {task.donor}", Activity.HEAL
        case Settle():
            return "brings in the mean of all machines", Activity.AVERAGE


class BarrierTasks:
    """Executor of one rank's barrier tasks: those for which it has a saver and an evaluator.

    Args:
        parts: The rank's own.
        replicas: Replicas of all ranks of its machine.
        services: The saver, which takes its saved states, and the evaluator.
        meeting: Where the ranks, and the machines, meet.

    Threads:
        The worker of the rank.
    """

    def __init__(
        self,
        parts: RankParts,
        replicas: Sequence[Replica],
        services: Services,
        meeting: MeetingPoint,
    ) -> None:
        self._rank, self._index, self._outer = parts.rank, parts.index, parts.outer
        self._replica, self._replicas = parts.replica, replicas
        self._saver, self._evaluator, self._team = services.saver, services.evaluator, services.team
        self._collective = meeting.collective
        self._blocks = PinnedBlocks(self._replica.lane)

    def serve(self, task: BarrierTask, wait: Callable[[], bool], moved: Callable[[], None]) -> TaskDone:
        """Execute a task and return the answer to the coordinator.

        Args:
            task: Task to execute.
            wait: Blocks until there is something to look at; False: told to leave.
            moved: Called after each batch of an evaluation.

        Raises:
            Exception: Raised by the user's code.
        """
        match task:
            case Evaluate(merges=True) if self._evaluator is not None:
                return self._evaluator.merge(self._rank, task.number)
            case Evaluate() if self._evaluator is not None:
                with self._replica.evaluated_weights():
                    return self._evaluator.run(self._index, self._replica, task.number, wait, moved)
            case SaveState():
                is_follower_first = not self._team.leads and self._index == 0
                holds_model = task.model == self._rank or (task.is_best and is_follower_first)
                if holds_model or self._saver.keeps_ranks:
                    part = capture(self._replica, shared=holds_model, outer=self._outer, blocks=self._blocks)
                    self._saver.put(self._rank, part)
                elif self._saver.keeps_generators:
                    self._saver.put(self._rank, capture_generator(self._replica))
            case CopyReplica(receiver=None):
                donor = task.donor - self._rank + self._index
                self._replica.copy_from(self._replicas[donor])
                self._replica.lane.drain()  # the donor may train on as soon as the coordinator hears
            case CopyReplica(donor, int(receiver)):
                self._copy_between(donor, receiver)
            case Settle() if isinstance(self._collective, HostMean):
                self._collective.settle(self._index)
            case _:
                raise ProtocolError(f"rank {self._rank} cannot do {task}")
        return TaskDone(self._rank)

    def _copy_between(self, donor: int, receiver: int) -> None:
        """Copy a replica to a rank of another machine."""
        team = self._team
        assert team.machines is not None
        if self._rank == donor:
            team.machines.send(capture(self._replica, shared=True)(), team.machine_of(receiver))
            return
        state = team.machines.receive(team.machine_of(donor))
        restore(self._replica, state, state["model"], state["buffers"], state["ema"])
