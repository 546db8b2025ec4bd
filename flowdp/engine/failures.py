"""The failures of a run: the first one is the answer, the others are notes on it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable

__all__ = ["Failures"]


class Failures:
    """Collects what went wrong, in the order in which it did.

    Threads:
        Any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # serialises who is first
        self.first: BaseException | None = None

    def add(self, error: BaseException, rank: int | None = None) -> str:
        """Keep an error; returns it in words."""
        where = "" if rank is None else f"rank {rank}: "
        with self._lock:
            if self.first is None:
                self.first = error
            elif error is not self.first:
                self.first.add_note(f"Then {where}{type(error).__name__}: {error}")
        return f"{where}{type(error).__name__}: {error}"

    def note_stuck(self, threads: Iterable[threading.Thread]) -> None:
        """Say in the first error which threads are still inside the user's code, and where."""
        stuck = [thread for thread in threads if thread.is_alive()]
        if self.first is None or not stuck:
            return  # the frames of all threads, once asked for, keep what lies in them
        frames = sys._current_frames()
        for thread in stuck:
            frame = frames.get(thread.ident or -1)
            if frame is not None:
                stack = "".join(traceback.format_stack(frame))
                self.first.add_note(f"{thread.name} has not left yet; it is here:\n{stack}")
