"""The `Rounds` protocol: the differences between the policies, as the coordinator sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from flowdp.policy.cadence import Cadence
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import DataEnded, Fact
from flowdp.protocol.position import Position

__all__ = ["Averages", "Constraints", "Rounds", "Shares"]

Shares = Literal["equal", "steps", "samples"]
"""Follows from the speed of a rank: nothing, its steps in a round, or its samples of a global batch."""

Averages = Literal["parameters", "snapshots", "gradients"]
"""The mean is taken of parameters and buffers at the gate, of copies of them while the ranks train on, or of
gradients, before one step of all ranks."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits on the orders that may be given now.

    Attributes:
        hold: Nothing new, and the round in progress ends at the next step boundary: for a stop, a pause or a
            barrier.
        meet: All ranks shall meet at the gate soon.
        limit: No round begins at this global step or behind it; None: no limit.
    """

    hold: bool = False
    meet: bool = False
    limit: int | None = None


class Rounds(Protocol):
    """The rounds of a run under one policy. A class for each; `machine.policies` chooses.

    Attributes:
        shares: Unit of the work that is dealt by speed.
        averages: Values that the mean is taken of.
        cadence: Quotas of rounds of several steps; None where every round is one step.
        global_step: Steps of all ranks in the means so far.
    """

    shares: ClassVar[Shares]
    averages: ClassVar[Averages]
    cadence: Cadence | None
    global_step: int

    @property
    def is_idle(self) -> bool:
        """Whether no order and no round is out."""
        ...

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank in a round."""
        ...

    @property
    def wants_meeting(self) -> bool:
        """Whether the ranks must meet before anything else is dealt."""
        return False

    @property
    def next_round(self) -> int:
        """Number of the next round, where none is out."""
        ...

    @property
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""
        ...

    def resume(self, position: Position) -> None:
        """Begin where another run stood; its measurements count where the number of ranks is the same."""
        ...

    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds, the failure of a rank among them where the others go on.

        Raises:
            ProtocolError: The fact does not belong to a round that is out.
        """
        ...

    def end(self, end: DataEnded) -> list[Command]:
        """Shorten the orders that are out in an epoch whose end was read."""
        ...

    def pop_bad(self) -> dict[int, tuple[int, int] | None]:
        """Ranks found with NaN or inf parameters since the last call -> their first bad (epoch, batch)."""
        ...

    def decide(self, now_ms: float, constraints: Constraints) -> list[Command]:
        """Give the orders that are due."""
        ...

    def deadline_ms(self) -> float | None:
        """Time at which `decide` is due again without a fact; None: never."""
        ...

    def check(self) -> None:
        """Check that the orders that are out agree with the ledgers.

        Raises:
            ProtocolError: They do not.
        """
        ...
