"""What a rank does while all stand still: evaluate, put its state down, become what another one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowdp.checkpoint.rank_state import capture
from flowdp.checkpoint.writer import Saver
from flowdp.engine.evaluation import Evaluator
from flowdp.errors import ProtocolError
from flowdp.protocol.messages import Adopt, Adopted, Capture, Captured, Duty, Evaluate, Evaluated
from flowdp.replica.replica import Replica

__all__ = ["Duties"]


class Duties:
    """The duties of one rank.

    Args:
        replica: The rank's own.
        replicas: Of all ranks.
        saver: Takes what is put down; None where no run is kept.
        evaluator: Evaluates; None where nothing is evaluated.
        rank: Whose.

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

    def name(self, duty: Duty) -> str:
        """What the rank does, in words."""
        match duty:
            case Evaluate():
                return f"evaluates after epoch {duty.epoch}"
            case Capture():
                return "puts down its state"
            case Adopt():
                return f"becomes what rank {duty.donor} is"

    def serve(
        self, duty: Duty, wait: Callable[[], bool], moved: Callable[[], None]
    ) -> Evaluated | Captured | Adopted:
        """Do a duty; returns the answer to the coordinator.

        Args:
            duty: Which.
            wait: Blocks until there is something to look at; False: told to leave.
            moved: Called after each batch of an evaluation.

        Raises:
            Exception: What the user's code raised.
        """
        match duty:
            case Evaluate() if self._evaluator is not None:
                return Evaluated(self._rank, self._evaluator.run(self._rank, self._replica, wait, moved))
            case Capture() if self._saver is not None:
                self._saver.put(self._rank, capture(self._replica, shared=duty.model == self._rank))
                return Captured(self._rank)
            case Adopt():
                self._replica.adopt(self._replicas[duty.donor])
                self._replica.lane.drain()  # the donor may train on as soon as the coordinator hears
                return Adopted(self._rank)
        raise ProtocolError(f"rank {self._rank} cannot do {duty}")
