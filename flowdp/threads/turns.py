"""A lock that is given in the order in which threads ask for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Turns"]


class Turns:
    """Lets one thread at a time do something, first come, first served.

    A plain lock is not fair: a thread that takes it again at once would keep all others waiting for ever.

    Threads:
        Any but the main one, where Ctrl-C could come between `begin` and `end`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: int | None = None

    def begin(self, gives_up: Callable[[], bool]) -> bool:
        """Wait for the turn. Every true answer is followed by `end`.

        Args:
            gives_up: Whether the caller waits no longer; asked again at each `look`.

        Returns:
            False where the caller gave up.
        """
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            self._changed.wait_for(
                lambda: gives_up() or (self._holder is None and self._waiting[0] is ticket)
            )
            self._waiting.remove(ticket)
            if gives_up():
                self._changed.notify_all()
                return False
            self._holder = threading.get_ident()
            return True

    def end(self) -> None:
        """Give the turn to the thread that has waited longest."""
        with self._changed:
            if self._holder == threading.get_ident():  # else it was taken away
                self._pass_on()

    def take_away(self, thread: threading.Thread) -> None:
        """Pass the turn on if this thread has it: its remaining work is of no use to any run."""
        with self._changed:
            if self._holder is not None and self._holder == thread.ident:
                self._pass_on()

    def _pass_on(self) -> None:
        self._holder = None
        self._changed.notify_all()

    def look(self) -> None:
        """Have every waiting thread ask again whether it gives up."""
        with self._changed:
            self._changed.notify_all()
