"""Rounds of a run under one policy, as the coordinator sees them, and what the policies have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from flowdp.errors import ProtocolError
from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.epochs import Epochs
from flowdp.policy.cadence import Cadence
from flowdp.policy.shares import changed_shares
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import DataEnded, Fact, Outcome, SyncAck, Work
from flowdp.protocol.position import Position

__all__ = ["Averages", "Rounds", "Shares", "outcome_of", "reason_of", "summary"]

Shares = Literal["equal", "steps", "samples"]
"""Follows from the speed of a rank: nothing, its steps in a round, or its samples of a global batch."""

Averages = Literal["parameters", "snapshots", "gradients"]
"""The mean is taken of parameters and buffers at the gate, of copies of them while the ranks train on, or of
gradients, before one step of all ranks."""


class Rounds(ABC):
    """The rounds of a run under one policy. A class for each; `machine.policies` chooses.

    Args:
        config: The run.
        epochs: Ledgers and tallies.

    Attributes:
        shares: Unit of the work that is dealt by speed.
        averages: Values that the mean is taken of.
        cadence: Quotas of rounds of several steps; None where every round is one step.
        global_step: Steps of all ranks in the means so far.
        next_round: Number of the next round, where none is out.
        limit: No round begins at this global step or behind it; None: no limit. Set before `decide`.
    """

    shares: ClassVar[Shares]
    averages: ClassVar[Averages]
    cadence: Cadence | None = None

    def __init__(self, config: CoordinatorConfig, epochs: Epochs) -> None:
        self.epochs = epochs
        self.world_size = config.world_size
        self.global_step = 0
        self.next_round = 0
        self.limit: int | None = None
        self._plan = 0
        self._bad: dict[int, tuple[int, int] | None] = {}
        self._reported_shares: tuple[float, ...] = (1.0 / config.world_size,) * config.world_size

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no order and no round is out."""

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank in a round."""
        return 1 if self.cadence is None else self.cadence.anchor

    @property
    def wants_meeting(self) -> bool:
        """Whether the ranks must meet before anything else is dealt."""
        return False

    @property
    @abstractmethod
    def pace_ms(self) -> tuple[float, ...]:
        """Time of one step per rank; 0 where not measured. Shape (world_size,)."""

    def resume(self, position: Position) -> None:
        """Begin where another run stood; its measurements count where the number of ranks is the same."""
        self.global_step, self.next_round = position.global_step, position.round
        is_same = position.world_size == self.world_size == len(position.pace_ms)
        if is_same and self.cadence is not None and position.anchor is not None:
            self.cadence.restore(position.anchor, position.pace_ms, position.drifts)

    @abstractmethod
    def take(self, fact: Fact, now_ms: float) -> list[Command]:
        """Take a fact that concerns rounds, the failure of a rank among them where the others go on.

        Raises:
            ProtocolError: The fact does not belong to a round that is out.
        """

    @abstractmethod
    def end(self, end: DataEnded) -> list[Command]:
        """Shorten the orders that are out in an epoch whose end was read."""

    def pop_bad(self) -> dict[int, tuple[int, int] | None]:
        """Ranks found with NaN or inf parameters since the last call -> their first bad (epoch, batch)."""
        bad, self._bad = self._bad, {}
        return bad

    @abstractmethod
    def decide(self, now_ms: float, *, hold: bool = False, meet: bool = False) -> list[Command]:
        """Give the orders that are due.

        Args:
            now_ms: The time.
            hold: Nothing new, and the round in progress ends at the next step boundary: for a stop, a pause
                or a barrier.
            meet: All ranks shall meet at the gate soon.
        """

    def deadline_ms(self) -> float | None:
        """Time at which `decide` is due again without a fact; None: never."""
        return None

    def _changed_shares(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Shares in proportion to these weights, where they differ from those reported last; else empty."""
        shares = changed_shares(self._reported_shares, weights)
        self._reported_shares = shares or self._reported_shares
        return shares


def outcome_of(acks: Mapping[int, SyncAck]) -> Outcome:
    """The outcome that all ranks have left a round with.

    Raises:
        ProtocolError: Two ranks left it with different outcomes.
    """
    outcome = next(iter(acks.values())).outcome
    for rank, ack in acks.items():
        if ack.outcome != outcome:
            raise ProtocolError(f"rank {rank} left round {outcome.round} with another outcome: {ack.outcome}")
    return outcome


def summary(works: Sequence[Work], last: Work) -> dict[str, Any]:
    """Fields of `RoundEnded` that follow from the ranks' reports.

    Args:
        works: Work of each rank since the record before. Shape (world_size,).
        last: The one whose learning rates are the record's.
    """
    whole = Work.total(works)
    return {
        "loss": whole.loss,
        "lr": last.lr,
        "group_lrs": last.group_lrs,
        "busy_ms": tuple(work.busy_ms for work in works),
        "data_ms": tuple(work.data_ms for work in works),
        "wait_ms": tuple(work.wait_ms for work in works),
        "grad_norm": whole.grad_norm,
        "grad_norm_max": whole.grad_norm_max,
    }


def reason_of(outcome: Outcome) -> str:
    """The reason why a round was no ordinary one; "" for an ordinary one."""
    if outcome.left:
        return f"rank {', '.join(map(str, outcome.left))} left"
    if outcome.bad:
        return f"rank {', '.join(map(str, outcome.bad))} had NaN or inf parameters"
    reasons = {
        "the run stops": outcome.stop,
        "a pause begins": outcome.pause,
        "an evaluation, a checkpoint or a copy is due": outcome.halt,
        "it took too long and was cut short": outcome.hurried,
    }
    return next((reason for reason, is_there in reasons.items() if is_there), "")
