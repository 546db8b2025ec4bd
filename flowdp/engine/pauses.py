"""Who wants a run to stand still: it goes on when nobody does any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flowdp.messages import Requested

__all__ = ["Pauses"]


class Pauses:
    """The wish to pause, of `pause()` and of everybody inside `paused()`.

    Args:
        request: Takes a wish, and gives its number.

    Threads:
        Any.
    """

    def __init__(self, request: Callable[[Requested], int]) -> None:
        self._request = request
        self._lock = threading.Lock()  # serialises the counts, and with them the wishes
        self._is_wanted = False
        self._inside = 0

    def pause(self) -> None:
        """Stand still until `unpause`."""
        with self._lock:
            self._is_wanted = True
            self._request(Requested("pause"))

    def unpause(self) -> None:
        """Go on; where somebody is inside, when the last one leaves."""
        with self._lock:
            self._is_wanted = False
            self._go_on()

    def enter(self) -> int:
        """Stand still until this caller leaves; gives the number of the wish, to wait for."""
        with self._lock:
            self._inside += 1
            return self._request(Requested("pause"))

    def leave(self) -> None:
        """Undo an `enter`."""
        with self._lock:
            self._inside -= 1
            self._go_on()

    def _go_on(self) -> None:
        if not self._is_wanted and not self._inside:
            self._request(Requested("unpause"))
