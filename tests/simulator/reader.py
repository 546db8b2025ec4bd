"""A dataset of unknown length: one reader, ahead of the ranks, that alone knows where an epoch ends."""

from __future__ import annotations

from collections.abc import Callable

from flowdp.protocol.messages import DataEnded
from flowdp.sim.world import Clock
from tests.simulator.scenario import Scenario

__all__ = ["VirtualReader"]

_Key = tuple[int, int]


class VirtualReader:
    """A `map_source.Reader` on virtual time: it reads in order, and only so far ahead.

    Args:
        scenario: Lengths of the epochs, the time of a batch, how far ahead.
        clock: Virtual time.
        wake: Called as `wake(rank, key)` when a batch is there that `take` did not have.
        ended: Called when the end of an epoch was read.
        machine: Number of the machine whose batches it reads, where each has a stream of its own.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        wake: Callable[[int, _Key], None],
        ended: Callable[[DataEnded], None],
        machine: int = 0,
    ) -> None:
        self._scenario = scenario
        self._clock = clock
        self._wake = wake
        self._ended = ended
        start = scenario.config.start
        self._machine = machine
        self._next: _Key = (0 if start is None else start.done, machine)
        self._lying: set[_Key] = set()
        self._lent: dict[_Key, int] = {}  # taken, and in no mean yet
        self._waiting: dict[_Key, int] = {}
        self._is_reading = False

    def start(self) -> None:
        """Begin to read, if it has not begun and there is something to do."""
        has_room = len(self._lying) < self._scenario.ahead or bool(self._waiting)
        is_over = self._scenario.config.epochs is not None and self._next[0] >= self._scenario.config.epochs
        if has_room and not is_over and not self._is_reading:
            self._is_reading = True
            self._clock.after(self._scenario.read_ms, self._has_read)

    def take(self, rank: int, *keys: _Key) -> _Key | None:
        """Hand the batches of a step over.

        Returns:
            None; or the first of them that has not been read. Then none is handed over, and `wake` follows
            if there is such a batch.
        """
        missing = next((key for key in keys if key not in self._lying), None)
        if missing is None:
            self._lying.difference_update(keys)
            self._lent |= dict.fromkeys(keys, rank)
        elif missing >= self._next:
            self._waiting[missing] = rank
        self.start()
        return missing

    def settle(self, rank: int) -> None:
        """A mean holds what a rank has taken."""
        self._lent = {key: taker for key, taker in self._lent.items() if taker != rank}

    def reclaim(self, rank: int) -> None:
        """A rank is lost: what it took, and no mean holds, can be taken again."""
        self._lying.update(key for key, taker in self._lent.items() if taker == rank)
        self.settle(rank)

    def _has_read(self) -> None:
        self._is_reading = False
        epoch, batch = self._next
        machines = self._scenario.streams
        if not self._scenario.exists(epoch, batch):
            self._waiting = {key: rank for key, rank in self._waiting.items() if key[0] > epoch}
            self._next = (epoch + 1, self._machine)
            is_whole = not self._scenario.uneven
            read = self._scenario.length(epoch) if is_whole else None
            self._ended(DataEnded(epoch, batch // machines, self._machine, machines, read))
        else:
            self._lying.add(self._next)
            rank = self._waiting.pop(self._next, None)
            self._next = (epoch, batch + machines)
            if rank is not None:
                self._wake(rank, (epoch, batch))
        self.start()
