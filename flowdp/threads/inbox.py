"""The inbox of a thread: the one place where it is woken."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ["LISTEN_S", "Inbox"]

LISTEN_S = 0.5
"""Longest wait of the user's thread in one piece: Python misses a signal that comes just before a wait on a
lock begins."""

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with one reader and many writers that never blocks a writer.

    Threads:
        `post` and `is_empty`: any. `get`: the owner only.

    Attributes:
        post: Puts a message in; a function of the queue itself, which returns at once.
        is_empty: Whether no message waits; likewise, without a lock, for between any two steps.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self.post = self._queue.put
        self.is_empty = self._queue.empty

    def get(self, timeout_ms: float | None = None) -> T | None:
        """Wait for the next message; None when the time is up.

        Args:
            timeout_ms: How long to wait; None waits for ever, 0 does not wait.
        """
        try:
            return self._queue.get(timeout=None if timeout_ms is None else max(timeout_ms, 0.0) / 1e3)
        except Empty:
            return None
