"""Ctrl-C in the body of a loop over a run's records.

There the interrupt is raised in the user's code, and the loop's iterator only learns that it is not wanted
any more, as after a `break`. So while such a loop is open in the main thread, a handler counts the
interrupts, and then acts as Python's own does. Any other handler is left alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["hearing_interrupts"]


class _Handler:
    """Python's own handler, with a count."""

    def __init__(self) -> None:
        self.count = 0
        # One for each open loop. A set, not a number: a loop may end in another thread than it began in, and
        # `-= 1` there could be lost.
        self.holders: set[object] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        signal.default_int_handler(number, frame)


_handler = _Handler()


@contextmanager
def hearing_interrupts() -> Iterator[Callable[[], int]]:
    """A function that counts the interrupts so far, for as long as the block lasts.

    Threads:
        Any; only in the main thread is anything counted.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _handler)
    holder = object()
    if is_ours:
        _handler.holders.add(holder)
        signal.signal(signal.SIGINT, _handler)
    try:
        yield lambda: _handler.count if is_ours else 0
    finally:
        if is_ours:
            _handler.holders.discard(holder)
            _restore()


def _restore() -> None:
    """Put Python's handler back behind the last loop; one that ends in another thread leaves ours."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not _handler.holders and signal.getsignal(signal.SIGINT) is _handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
