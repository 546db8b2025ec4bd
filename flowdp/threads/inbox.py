"""The inbox of a thread: the one place where it is woken."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from flowdp.errors import ProtocolError

__all__ = ["LISTEN_S", "Inbox"]

LISTEN_S = 0.5
"""Longest wait of the user's thread in one piece: Python misses a signal that comes just before a wait on a
lock begins."""

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with one reader and many writers that never blocks a writer.

    The protocol bounds the outstanding messages, so a full inbox is a bug and not a reason to wait: one
    message over the limit raises.

    Threads:
        `post` and `is_empty`: any. `get`: the owner only.

    Args:
        limit: Most messages that may wait.
        name: Owner of the inbox, for the error.

    Attributes:
        is_empty: Whether no message waits; a function of the queue itself, without a lock, for between any
            two steps.
    """

    def __init__(self, limit: int, name: str) -> None:
        self.limit = limit
        self.name = name
        self._queue: SimpleQueue[T] = SimpleQueue()
        self.is_empty = self._queue.empty

    def post(self, message: T) -> None:
        """Put a message in; returns at once.

        Raises:
            ProtocolError: More messages wait than the protocol allows.
        """
        if self._queue.qsize() >= self.limit:
            raise ProtocolError(f"the inbox of {self.name} holds {self.limit} messages; one more: {message}")
        self._queue.put(message)

    def get(self, timeout_ms: float | None = None) -> T | None:
        """Wait for the next message; None when the time is up.

        Args:
            timeout_ms: How long to wait; None waits for ever, 0 does not wait.
        """
        try:
            if timeout_ms is None:
                return self._queue.get()
            return self._queue.get(timeout=max(timeout_ms, 0.0) / 1e3)
        except Empty:
            return None
