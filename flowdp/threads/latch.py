"""A latch: ready threads wait at it until all of them begin, or none."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """Opened or shut once; the first of the two counts.

    Threads:
        `wait`: any. `open` and `shut`: one thread, which may be interrupted anywhere in them and call again.
    """

    def __init__(self) -> None:
        self._is_open: bool | None = None
        self._is_decided = threading.Event()

    def open(self) -> None:
        """Let all threads begin."""
        self._decide(True)

    def shut(self) -> bool:
        """Send all threads away; False where they have begun already."""
        self._decide(False)
        return not self._is_open

    def wait(self) -> bool:
        """Whether the calling thread may begin, once that is decided."""
        self._is_decided.wait()
        return bool(self._is_open)

    def _decide(self, is_open: bool) -> None:
        if self._is_open is None:
            self._is_open = is_open
        self._is_decided.set()
