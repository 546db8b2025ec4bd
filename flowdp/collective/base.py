"""Interface of collectives: the calls of a rank, and the results of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flowdp.collective.outer import OuterMomentum
from flowdp.protocol.messages import Outcome

__all__ = ["NOTHING", "Averaging", "Collective", "Judge", "Reading", "is_held", "unjudged"]


@dataclass(frozen=True, slots=True)
class Averaging:
    """Timing and drift of a mean, for one rank.

    Attributes:
        sync_ms: Time spent averaging.
        drift: ||replica - mean|| / ||mean|| before the mean was taken; None where not measured, and for a
            rank that gave nothing: it may hold NaN.
        norm: ||mean||, the 2-norm of the averaged parameters; None where the drift is not measured.
    """

    sync_ms: float
    drift: float | None
    norm: float | None = None


NOTHING = Averaging(0.0, None)
"""The result of a round that averages nothing."""

Reading = Callable[[], Averaging]
"""Deferred timing and drift of a mean; a call waits until the device has passed the averaging."""


Judge = Callable[[], Tensor | None]
"""Check of a rank's memory, enqueued behind its last step. Returns, on the device, whether it holds
anything that is not finite: then it is left out of the mean there. Bool, shape []. None: it is not checked on
the device, and counts for its samples."""


def unjudged() -> None:
    """A judge that rejects nothing: every replica counts for its samples."""


def is_held(outcome: Outcome) -> bool:
    """Whether a round averages anything: several members, and samples.

    A mean of all machines has those since the last one of all: all ranks may have been called away from inner
    rounds, and have none since their last inner mean.
    """
    return len(outcome.members) > 1 and any(outcome.weights)


class Collective(Protocol):
    """Averages the replicas of a round: by the last arrival, by all members together, or by both.

    A round with one member or without samples changes nothing.

    Attributes:
        masks: Whether replicas that a judge rejects are left out on the device; else the host must know of
            them at the gate.
        outer: Momentum of each rank, where the means have an outer step; ranks whose means are taken in the
            host's memory share one. Empty: they are plain means.
    """

    masks: bool
    outer: Sequence[OuterMomentum]

    def prepare(self, rank: int, judge: Judge = unjudged) -> None:
        """Copy replaced tensors into flat memory, judge it, and mark on `compute` that the replica is ready.

        Raises:
            CollectiveError: The module lost a tensor or changed its shape.

        Threads: worker `rank`, once a round, before it enters the gate.
        Streams: the rank's `compute` is current. The host waits only where the mean is taken on the host.
        """
        ...

    def launch(self, outcome: Outcome) -> None:
        """Launch the part that is done once for all ranks.

        Raises:
            CollectiveError: The members cannot be averaged.

        Threads: the last arrival at the gate, while all others stand in it.
        Streams: every member's `comm` waits for the marks of all members; the host does not wait.
        """
        ...

    def average(self, rank: int, outcome: Outcome) -> Reading:
        """Replace the averaged tensors of this rank's replica by the mean over the members.

        Returns:
            Timing and drift, deferred. Read it before the eighth round after this one.

        Threads: worker `rank`, once a round, after the gate has let it go; so is the reading.
        Streams: the rank's `compute` is current, and waits for the mean.
        """
        ...

    def abort(self) -> None:
        """Release the devices that hang in a collective, for good; the mean is not to be trusted.

        Threads: any.
        """
        ...

    def close(self) -> None:
        """Release driver resources, in order; a second call does nothing.

        Threads: any, when no worker runs any more.
        """
        ...
