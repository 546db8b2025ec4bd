"""The failures of a run: the first one is the answer, the others are notes on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from flowdp.errors import StallError
from flowdp.policy.formats import format_error
from flowdp.threads.stacks import stacks

__all__ = ["Failures"]

log = logging.getLogger("flowdp")


class Failures:
    """Errors of a run in the order in which they came.

    Threads:
        Any.

    Attributes:
        first: The answer; None while nothing is wrong.
        first_s: When it came, by `time.monotonic`.
        forgiven: Errors of ranks that the others went on without, by rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # orders errors, and guards whether the first was reported
        self._said: set[str] = set()  # failures
        self._stuck: set[str] = set()  # names of threads
        self._is_concluded = False
        self._held: dict[int, BaseException] = {}
        self.first: BaseException | None = None
        self.first_s = 0.0
        self.forgiven: dict[int, BaseException] = {}

    def add(self, error: BaseException, rank: int | None = None, *, is_awaited: bool = False) -> str:
        """Keep an error and return it as text. One of a cause that another rank has reported is dropped.

        Args:
            error: The error.
            rank: In which rank, where it was in one.
            is_awaited: join() already waits for this thread, so the error still counts after the run
                concluded.
        """
        what = format_error(error)
        words = what if rank is None else f"rank {rank}: {what}"
        cause = format_error(error.__cause__ or error)
        with self._lock:
            if cause in self._said:
                return words
            self._said.add(cause)
            is_late = self._is_concluded and not is_awaited
            if not is_late and self.first is None:
                # The time first: a reader that sees the error without the lock reads its time.
                self.first_s, self.first = time.monotonic(), error
            elif not is_late and self.first is not None:
                self.first.add_note(f"Then {words}")
        if is_late:
            log.error("a failure after the run's end: %s", words, exc_info=error)
        return words

    def hold(self, error: BaseException, rank: int) -> str:
        """Keep an error apart that the others may go on without; returns it in words."""
        with self._lock:
            self._held[rank] = error
        return f"rank {rank}: {format_error(error)}"

    def forgive(self, rank: int) -> None:
        """Log the error of a rank that the others go on without: it ends nothing."""
        with self._lock:
            error = self._held.pop(rank)
            self.forgiven = {**self.forgiven, rank: error}  # a new one: others read it without the lock
        log.error("rank %d has left, and the others go on: %s", rank, error, exc_info=error)

    def blame(self, rank: int) -> None:
        """Count a tolerated error of this rank as a failure: the other ranks cannot continue."""
        with self._lock:
            error = self._held.pop(rank, None)
        if error is not None:
            self.add(error, rank)

    def conclude(self) -> None:
        """Mark the result as delivered: later failures are logged, as a note on it would go unseen."""
        with self._lock:
            self._is_concluded = True

    def note_stuck(self, threads: Iterable[threading.Thread]) -> None:
        """Say in the first error which threads are still inside the user's code, and where; each once."""
        if self.first is None:
            return
        for name, stack in stacks(threads).items():
            with self._lock:
                if name not in self._stuck:
                    self._stuck.add(name)
                    is_told = isinstance(self.first, StallError) and self.first.stacks.get(name) == stack
                    where = "its stack is still the same" if is_told else f"it is here:\n{stack}"
                    self.first.add_note(f"{name} has not left yet; {where}")
