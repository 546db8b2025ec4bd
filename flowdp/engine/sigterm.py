"""SIGTERM as a request to stop: clusters send it some time before they kill.

Python runs a signal's handler in the main thread, between any two bytecodes: in the middle of a call of this
library too, with its locks held. So the handler only puts a word into a queue, which is safe there, and a
thread that waits for it asks for the stop.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any

from flowdp.errors import OptionError

__all__ = ["SigtermStop", "check_sigterm"]

log = logging.getLogger("flowdp")


def check_sigterm() -> None:
    """Check that SIGTERM can be taken over here.

    Raises:
        OptionError: This is not the main thread, or the handler from before could not be put back.
    """
    if threading.current_thread() is not threading.main_thread():
        raise OptionError(
            "handle_sigterm=True works in the main thread alone: Python lets no other thread set the handler "
            "of a signal. Start the run there, or call run.stop() from a handler of your own"
        )
    if signal.getsignal(signal.SIGTERM) is None:
        raise OptionError(
            "handle_sigterm=True cannot take SIGTERM over from a library's handler that is not written in "
            "Python: it could not be put back"
        )


class SigtermStop:
    """Handler of SIGTERM until it is closed: the first one asks for a stop, the next one ends the process.

    That is, it goes to the handler from before, which by default ends the process. All that are open when the
    first one comes hear it.

    Args:
        request_stop: Called once at most, by a thread of its own.

    Threads:
        Made in the main thread. `close`: any. It puts the handler from before back where it is called in the
        main thread, nothing else is open, and no other handler was set since; until then that handler
        gets every SIGTERM through ours.

    Raises:
        OptionError: SIGTERM cannot be taken over here; see `check_sigterm`.
    """

    def __init__(self, request_stop: Callable[[], object]) -> None:
        check_sigterm()
        self._request_stop = request_stop
        self._words: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="flowdp-sigterm", daemon=True)
        try:
            self._thread.start()
            _open.append(self)
            earlier = signal.getsignal(signal.SIGTERM)
            if not isinstance(earlier, _Handler):
                signal.signal(signal.SIGTERM, _Handler(earlier))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hear no SIGTERM any more. May be called again, for the main thread to put the handler back."""
        with suppress(ValueError):  # it may have heard one
            _open.remove(self)
        self._words.put(False)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        _restore()

    def hear(self) -> None:
        """Pass a SIGTERM on to the thread. Returns at once; safe in a handler."""
        self._words.put(True)

    def _wait(self) -> None:
        if self._words.get():
            log.warning("SIGTERM: the run stops after its round; another SIGTERM ends the process")
            self._request_stop()


_open: list[SigtermStop] = []
"""Those that have heard nothing yet. Any thread may take itself out while the main thread reads."""

os.register_at_fork(after_in_child=_open.clear)  # a forked process has our handler, and no thread of ours


class _Handler:
    """Our handler, with the one from before. That one may be the user's, which calls an older one of ours."""

    def __init__(self, earlier: Any) -> None:
        self.earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        hearing = list(_open)
        _open.clear()
        for stop in hearing:
            stop.hear()
        if hearing:
            return
        if callable(self.earlier):
            self.earlier(number, frame)
        elif self.earlier is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _restore() -> None:
    if _open or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGTERM, handler.earlier)
