"""Checkpoints, snapshots and the best state of a run, from the states that ranks save at a barrier.

The ranks copy to the host and train on; one thread, that of an outlet, writes or sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowdp.checkpoint.weights import Weights
from flowdp.checkpoint.writer import CapturedState, Job, Outlet, PendingState
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import Save
from flowdp.protocol.position import Position
from flowdp.threads.inbox import LISTEN_S

__all__ = ["Saver"]


class Saver:
    """Receives the ranks' saved states, and makes checkpoints and snapshots of them.

    Args:
        outlet: Takes the checkpoints; None: they go nowhere.
        best: The best weights so far, where the run keeps it.
        orders: Gives the checksums of the orders that a sampler drew for the epochs that are open at a
            position; None: they are not known.
        keeps_ranks: Whether the states of all ranks of this machine are of use. Where all ranks have
            the same ones, that of the rank with the model is enough.
        keeps_generators: Whether the random numbers of this machine's ranks are, where nothing else is.

    Attributes:
        outlet: As given.
        orders: As given.
        keeps_ranks: As given.
        keeps_generators: As given.
    """

    def __init__(
        self,
        outlet: Outlet | None = None,
        best: Weights | None = None,
        orders: Callable[[Position], Mapping[int, int] | None] = lambda _: None,
        *,
        keeps_ranks: bool = True,
        keeps_generators: bool = False,
    ) -> None:
        self.outlet = outlet
        self.orders = orders
        self.keeps_ranks, self.keeps_generators = keeps_ranks, keeps_generators
        self._best: Callable[[], Weights | None] = lambda: best
        self._changed = threading.Condition()  # guards what follows
        self._states: dict[int, PendingState] = {}
        self._snapshot: CapturedState | None = None
        self._answered = 0  # snapshots
        self._is_over = False

    def start(self) -> None:
        """Start the outlet's thread, where there is one.

        Threads:
            The one that starts the run.
        """
        if self.outlet is not None:
            self.outlet.thread.start()

    @property
    def thread(self) -> threading.Thread | None:
        """Thread of the outlet; None without one."""
        return None if self.outlet is None else self.outlet.thread

    @property
    def problems(self) -> Sequence[str]:
        """Failed writes, as text."""
        return () if self.outlet is None else self.outlet.problems

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or waits to be."""
        return self.outlet is not None and self.outlet.is_busy

    @property
    def has_folder(self) -> bool:
        """Whether checkpoints are written into a folder of this machine."""
        return self.outlet is not None and self.outlet.folder is not None

    @property
    def last(self) -> Path | None:
        """The newest file in the folder, of this run or of the one it continues; None while there is none."""
        folder = None if self.outlet is None else self.outlet.folder
        there = [] if folder is None else folder.paths()
        return there[0] if there else None

    @property
    def best(self) -> Weights | None:
        """The weights of the best epoch, where the run keeps them and there was one."""
        return self._best()

    def put(self, rank: int, state: PendingState) -> None:
        """Take a rank's saved state.

        Threads:
            The worker of the rank, at a barrier.
        """
        with self._changed:
            self._states[rank] = state

    def save(self, command: Save, history: Sequence[EpochMetrics]) -> None:
        """Make the checkpoint or snapshot of a command, once all ranks have saved. Does not wait.

        Threads:
            The coordinator.
        """
        with self._changed:
            states, self._states = self._states, {}
            position = command.position
            # Now, for a writer that comes late may find that the sampler has long gone on.
            orders = self.orders(position)
            # A machine that follows has the best model alone, from its own first rank.
            is_own = command.model in states or not command.is_best
            model = command.model if is_own else min(states)
            captured = CapturedState(states, model, position, history[: position.done], orders)
            if command.is_best:
                self._best = lambda: captured.weights
            if command.snapshots > self._answered:
                self._snapshot, self._answered = captured, command.snapshots
            self._changed.notify_all()
        if command.version is not None and self.outlet is not None:
            job = Job(command.version, command.capture, captured, self._best, is_between=command.is_between)
            self.outlet.queue(job)

    def wait_for_snapshot(self, wish: int) -> CapturedState | None:
        """Answer to a request for a snapshot; None where the run ends before.

        Threads:
            The user's.
        """
        with self._changed:
            while self._answered < wish:
                if self._is_over:
                    return None
                self._changed.wait(LISTEN_S)
            return self._snapshot

    def end(self) -> None:
        """Note the end of the run: no snapshot is given any more.

        Threads:
            The coordinator.
        """
        if self.outlet is not None and self.outlet.folder is not None:
            self.outlet.folder.lock.end()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Write pending checkpoints, and end the thread; False where it is not done in time.

        Threads:
            The coordinator, when no rank saves its state any more.
        """
        with self._changed:
            self._states.clear()
        return self.outlet is None or self.outlet.close(timeout_s)

    def close_transfer(self) -> None:
        """See `Outlet.close_transfer`."""
        if self.outlet is not None:
            self.outlet.close_transfer()

    def give_back(self) -> None:
        """Let another run have the folder: this one writes no more."""
        if self.outlet is not None and self.outlet.folder is not None:
            self.outlet.folder.lock.give_back()

    def let_go(self) -> None:
        """Drop the saved states of a run that is over, but for the best model and the answers given."""
        self._is_over = True
        self._states, self._snapshot, self._answered = {}, None, 0
        self.orders = lambda _: None
        if self.outlet is not None:
            self.outlet.let_go()
