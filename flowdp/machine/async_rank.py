"""State of a rank in asynchronous rounds: the orders that are out, and its steps; and all ranks by state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from flowdp.errors import ProtocolError
from flowdp.protocol.messages import DataEnded, StartEpoch, StepsDone, Work

__all__ = ["AHEAD", "AsyncRank", "RankIndex"]

AHEAD = 2
"""Orders per rank that are out."""


@dataclass(slots=True)
class AsyncRank:
    """One rank; all counts are steps since the run began.

    Attributes:
        orders: Orders that are out, oldest first.
        dealt: Steps of all its orders.
        trained: Steps it has reported.
        mean: Steps in the last mean that was applied.
        snapshot: Steps in the last snapshot, applied or under way.
        works: Its reports since the last round.
        limit: Steps at which it has to stop, by its last `Throttle`; None: it has had none.
        bad: (epoch, batch) of the first step since the last meeting with NaN or inf values.
    """

    orders: deque[StartEpoch] = field(default_factory=deque)
    dealt: int = 0
    trained: int = 0
    mean: int = 0
    snapshot: int = 0
    works: list[Work] = field(default_factory=list)
    limit: int | None = None
    bad: tuple[int, int] | None = None

    @property
    def done(self) -> int:
        """Steps that it has reported since its last snapshot; negative while a report is under way."""
        return self.trained - self.snapshot

    @property
    def reach(self) -> int:
        """Steps that it can take with its orders and its last `Throttle`."""
        return self.dealt if self.limit is None else min(self.limit, self.dealt)

    @property
    def pace_ms(self) -> float:
        """Time of one step: the median over its reports since the last round; 0 where none measured it."""
        measured = [work.pace_ms for work in self.works if work.pace_ms > 0.0]
        return median(measured) if measured else 0.0

    def give(self, order: StartEpoch) -> None:
        """Send it an order."""
        self.orders.append(order)
        self.dealt += order.steps

    def reported(self, done: StepsDone) -> StartEpoch:
        """Take a report; returns the part of the oldest order that it is about.

        Raises:
            ProtocolError: It is about another order.
        """
        order = self.orders[0] if self.orders else None
        if order is None or (order.plan, order.epoch) != (done.plan, done.work.epoch):
            raise ProtocolError(f"unexpected {done}: the oldest order is {order}")
        if done.is_last:
            return self.orders.popleft()
        batches = done.work.steps * order.group
        self.orders[0] = replace(order, batches=order.batches[batches:])
        return replace(order, batches=order.batches[:batches])

    def credit(self, order: StartEpoch, work: Work) -> None:
        """Count the trained steps of an order; the rest is dealt anew."""
        self.trained += work.steps
        self.dealt -= order.steps - work.steps
        self.works.append(work)
        self.bad = self.bad or work.bad

    def shorten(self, end: DataEnded) -> bool:
        """Drop the batches that the epoch does not have; returns whether there were any."""
        is_cut = False
        for index, order in enumerate(self.orders):
            kept = self.orders[index] = order.until(end)
            self.dealt -= order.steps - kept.steps
            is_cut = is_cut or kept.batches != order.batches
        return is_cut

    def check(self) -> None:
        """Check that the counts agree.

        Raises:
            ProtocolError: They do not.
        """
        if not self.mean <= self.snapshot <= self.dealt or self.trained > self.dealt:
            raise ProtocolError(f"counts out of order: {self}")
        if len(self.orders) > AHEAD:
            raise ProtocolError(f"{len(self.orders)} orders are out, {AHEAD} may be")


class RankIndex:
    """Ranks by state, so that a decision looks at those that have changed, and at no others.

    Args:
        ranks: States of all ranks. Shape (world_size,).

    Attributes:
        out: Ranks with orders.
        short: Those of them that have not trained their count since their last snapshot.
        held: Those of them that may not train all of their orders.
        changed: Ranks that were not asked since they changed whether orders are due.
        starved: Ranks that would have got an order, had there been data.
    """

    def __init__(self, ranks: Sequence[AsyncRank]) -> None:
        self._ranks = ranks
        self.out = set[int]()
        self.short = set[int]()
        self.held = set[int]()
        self.changed = set(range(len(ranks)))
        self.starved = set[int]()

    def sort(self, rank: int, count: int) -> None:
        """Sort a rank by its state, and by its count of steps in a round."""
        state = self._ranks[rank]
        is_out = bool(state.orders)
        for group, belongs in (
            (self.out, is_out),
            (self.short, is_out and state.done < count),
            (self.held, is_out and state.reach < state.dealt),
        ):
            if belongs:
                group.add(rank)
            else:
                group.discard(rank)

    def change(self, rank: int, count: int) -> None:
        """Sort a rank that has changed."""
        self.sort(rank, count)
        self.changed.add(rank)
