"""Events of a virtual cluster, for those who watch it; the tests judge every run through them."""

from __future__ import annotations

from collections.abc import Sequence

from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import Done, Step
from flowdp.protocol.commands import Command, EpochEnded, Finish, Paused, RoundEnded, Save
from flowdp.protocol.messages import DataEnded, Evaluation, Fact, Order, Outcome, Requested

__all__ = ["Watcher"]


class Watcher:
    """Hears of everything that happens in a virtual cluster, and does nothing.

    Each method is called at the moment of the event, before anything else happens; times are virtual.
    """

    def passes(self, now_ms: float) -> None:
        """An event has happened at this time."""

    def stands_still(self, states: str) -> None:
        """Nothing is left to happen, and the run is not over."""

    # ------------------------------------------------------------------ coordinator
    def wishes(self, request: Requested, coordinator: Coordinator, now_ms: float) -> None:
        """The user asks for something."""

    def hears(self, fact: Fact, coordinator: Coordinator) -> None:
        """The coordinator is about to take a fact."""

    def decides(
        self, fact: Fact, commands: Sequence[Command], coordinator: Coordinator, now_ms: float
    ) -> None:
        """The coordinator has answered a fact."""

    def ordered(self, rank: int, order: Order, *, is_gone: bool, stirs: Sequence[str]) -> None:
        """The coordinator sends an order.

        Args:
            rank: Its receiver.
            order: The order.
            is_gone: The receiver has left.
            stirs: Ranks that do not stand still, and why; empty for an order to train.
        """

    def delivered(self, rank: int, order: Order) -> None:
        """An order has come into the inbox of a rank, which reads it before its next step."""

    def averages(self, round: int, samples: tuple[int, ...]) -> None:
        """The snapshots of a round are averaged."""

    def reported(self, record: RoundEnded, quotas: tuple[int, ...], now_ms: float) -> None:
        """A round is over; the next one has these quotas."""

    def ended(self, event: EpochEnded) -> None:
        """An epoch is complete."""

    def paused(self, event: Paused, is_somebody_in_a_step: bool) -> None:
        """The run stands still, or goes on."""

    def saved(self, save: Save, now_ms: float) -> None:
        """All ranks have captured their part of a checkpoint."""

    def fails(self, now_ms: float) -> None:
        """The coordinator ends the run by a failure that it found."""

    def loses(self, rank: int) -> None:
        """The run goes on without a rank."""

    def over(self, finish: Finish, coordinator: Coordinator) -> None:
        """The run is over."""

    # ------------------------------------------------------------------ data
    def read_end(self, end: DataEnded, now_ms: float) -> None:
        """The reader has found where an epoch ends."""

    def waits(self, rank: int, key: tuple[int, int], now_ms: float) -> None:
        """A rank waits for a batch that has not been read."""

    def goes_on(self, rank: int) -> None:
        """A rank waits no longer for a batch."""

    # ------------------------------------------------------------------ ranks
    def step_begins(self, rank: int, key: tuple[int, int], position: int) -> None:
        """A rank begins a step."""

    def step_ends(self, rank: int, step: Step) -> None:
        """A rank has taken a step."""

    def reports(self, rank: int, done: Done, steps: int) -> None:
        """A rank reports an order, after so many steps since its last report."""

    def idles(self, rank: int) -> None:
        """A rank has nothing to do."""

    def enters(self, rank: int) -> None:
        """A rank enters the gate."""

    def met(self, rank: int, outcome: Outcome) -> None:
        """A rank leaves the gate with an outcome."""

    def snapped(self, rank: int, round: int, steps: int, samples: int) -> None:
        """A rank has taken its snapshot."""

    def applied(self, rank: int, round: int) -> None:
        """A rank has applied the mean of a round to its replica."""

    def left(self, rank: int) -> None:
        """The thread of a rank has ended."""

    # ------------------------------------------------------------------ replicas
    def goes_bad(self, rank: int, *, is_late: bool) -> None:
        """The replica of a rank has NaN or inf parameters from now on.

        Args:
            rank: Its rank.
            is_late: The device leaves it out of the mean, and the host hears of it behind that.
        """

    def evaluated(self, result: Evaluation) -> None:
        """A rank has evaluated a batch."""

    def healed(self, rank: int) -> None:
        """A rank has copied a healthy replica."""
