"""Ctrl-C held back where it would leave an operation half done.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: also between the start of a
thread and the note that it was started.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Held", "interrupts_held"]


class Held:
    """Handler of SIGINT while it is held back: the first one waits, the second one passes.

    Args:
        earlier: The handler from before; None where there is nothing to hold back.
    """

    def __init__(self, earlier: Callable[[int, FrameType | None], Any] | None) -> None:
        self._earlier = earlier
        self._waiting: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Hold the first signal; pass the second one on at once."""
        assert number == signal.SIGINT
        is_second = bool(self._waiting)
        self._waiting.append(frame)
        if is_second:
            self.release()

    def release(self) -> None:
        """Pass on the signal that waits, if there is one."""
        frames, self._waiting = self._waiting, []
        if frames and self._earlier is not None:
            self._earlier(signal.SIGINT, frames[0])


@contextmanager
def interrupts_held() -> Iterator[Held]:
    """Hold a Ctrl-C back until the block is left; a second one does not wait.

    Threads:
        Any; in others than the main thread no Ctrl-C is heard anyway.
    """
    earlier = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(earlier):
        yield Held(None)
        return
    held = Held(earlier)
    try:
        signal.signal(signal.SIGINT, held)
        yield held
    finally:
        if signal.getsignal(signal.SIGINT) is held:
            signal.signal(signal.SIGINT, earlier)
        held.release()
