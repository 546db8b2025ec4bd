"""SIGTERM as a request to stop, and Ctrl-C in the body of a loop over a run's records.

Python runs a signal's handler in the main thread, between any two bytecodes: in the middle of a call of this
library too, with its locks held. So the handler of SIGTERM, which clusters send some time before they kill,
only puts a word into a queue, which is safe there, and a thread that waits for it asks for the stop.

A Ctrl-C in a loop over records is raised in the user's code, and the loop's iterator only learns that it is
not wanted any more, as after a `break`. So while such a loop is open in the main thread, a handler counts the
interrupts, and then acts as Python's own does. Any other handler is left alone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any

from flowdp.errors import OptionError
from flowdp.threads.stacks import Folding

__all__ = ["SigtermStop", "check_sigterm", "hearing_interrupts"]

log = logging.getLogger("flowdp")


# ---------------------------------------------------------------- SIGTERM
def check_sigterm() -> None:
    """Check that SIGTERM can be taken over here.

    Raises:
        OptionError: This is not the main thread.
    """
    if not _is_main():
        raise OptionError(
            "handle_sigterm=True works in the main thread alone: Python lets no other thread set the handler "
            "of a signal. Start the run there, or call run.stop() from a handler of your own"
        )


class SigtermStop:
    """Handler of SIGTERM until it is closed: the first one asks for a stop, the next one ends the process.

    That is, it goes to the handler from before, which by default ends the process. All that are open when the
    first one comes hear it.

    Args:
        request_stop: Called once at most, by a thread of its own.

    Threads:
        Made in the main thread. `close`: any; in the main thread it puts the handler from before back, where
        no other was set since. Until then that handler gets every SIGTERM through this one.

    Raises:
        OptionError: SIGTERM cannot be taken over here; see `check_sigterm`.
    """

    def __init__(self, request_stop: Callable[[], object]) -> None:
        check_sigterm()
        self._request_stop = request_stop
        self._words: SimpleQueue[bool] = SimpleQueue()
        self._is_open = True
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._wait, name="flowdp-sigterm", daemon=True)
        self._thread.start()
        self._earlier: Any = signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: all that are open, or else the handler from before."""
        handler: Any = self
        is_heard = False
        while isinstance(handler, SigtermStop):
            is_heard |= handler._hear()
            handler = handler._earlier
        if is_heard:
            return
        if callable(handler):
            handler(number, frame)
        elif handler is signal.SIG_DFL:
            signal.signal(number, handler)
            signal.raise_signal(number)

    def close(self) -> None:
        """Hear no SIGTERM any more. May be called again, for the main thread to put the handler back."""
        self._is_open = False
        self._words.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        handler: Any = signal.getsignal(signal.SIGTERM)
        while _is_main() and isinstance(handler, SigtermStop) and not handler._is_open:
            handler = handler._earlier
            signal.signal(signal.SIGTERM, handler)

    def _hear(self) -> bool:
        # A forked process has this handler, and no thread.
        is_first, self._is_open = self._is_open and os.getpid() == self._process, False
        if is_first:
            self._words.put(True)
        return is_first

    def _wait(self) -> None:
        if self._words.get():
            log.warning("SIGTERM: the run stops after its round; another SIGTERM ends the process")
            self._request_stop()


# ---------------------------------------------------------------- Ctrl-C
class _Counting:
    """Python's own handler of Ctrl-C, with a count."""

    def __init__(self) -> None:
        self.count = 0
        # One for each open loop. A set, not a number: a loop may end in another thread than it began in, and
        # `-= 1` there could be lost.
        self.holders: set[object] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        with Folding(KeyboardInterrupt):
            signal.default_int_handler(number, frame)


_counting = _Counting()


@contextmanager
def hearing_interrupts() -> Iterator[Callable[[], int]]:
    """A function that counts the interrupts so far, for as long as the block lasts.

    Threads:
        Any; only in the main thread is anything counted.
    """
    if not _is_main() or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _counting):
        yield lambda: 0
        return
    holder = object()
    _counting.holders.add(holder)
    signal.signal(signal.SIGINT, _counting)
    try:
        yield lambda: _counting.count
    finally:
        _counting.holders.discard(holder)
        # A loop that ends in another thread leaves the handler to the next one here.
        if _is_main() and not _counting.holders and signal.getsignal(signal.SIGINT) is _counting:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
