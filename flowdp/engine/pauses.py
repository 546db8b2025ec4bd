"""Nested and concurrent `paused()` blocks: the run continues when the last one ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowdp.protocol.messages import Requested

__all__ = ["Pauses"]


class Pauses:
    """Counter of open `paused()` blocks.

    Args:
        request: Takes a wish, and gives its number.

    Threads:
        Any.
    """

    def __init__(self, request: Callable[[Requested], int]) -> None:
        self._request = request
        self._lock = threading.Lock()  # serialises the count, and with it the wishes
        self._inside = 0

    def enter(self) -> int:
        """Let the run stand still; gives the number of the wish, to wait for."""
        with self._lock:
            self._inside += 1
            return self._request(Requested("pause"))

    def leave(self) -> None:
        """Undo an `enter`."""
        with self._lock:
            self._inside -= 1
        self.unpause()

    def unpause(self) -> None:
        """Continue the run, unless a block is open."""
        with self._lock:
            if not self._inside:
                self._request(Requested("unpause"))
