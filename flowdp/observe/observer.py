"""The observer: the thread that calls a run's callbacks with its records."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from flowdp.errors import FlowdpError
from flowdp.observe.callbacks import METHODS, Callback, overrides
from flowdp.observe.records import Record, Records
from flowdp.policy.formats import format_error
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EpochStarted, EvaluationEnded, RoundEnded
from flowdp.threads.inbox import LISTEN_S
from flowdp.threads.stacks import folded, stacks

__all__ = ["Observer"]

log = logging.getLogger("flowdp")

GRACE_S = 2.0
"""How long a callback may keep the end of a run that has failed."""


class Observer:
    """Calls the callbacks of a run in their order, on a thread of its own.

    Without anything to call it has no thread, and the run keeps nothing for it.

    Args:
        records: Records of the run, which has not begun.
        callbacks: In the order in which they are called.
        fail: Ends the run by an error; called where a callback that `ends_run` has raised, also when the run
            is over.
        patience_s: Time that one call may take before it is reported; None: no limit.

    Threads:
        Made and started by the thread that starts the run; read by any.
    """

    def __init__(
        self,
        records: Records,
        callbacks: Sequence[Callback],
        fail: Callable[[FlowdpError], object],
        patience_s: float | None = None,
    ) -> None:
        self._fail = fail
        self._records = records
        self._hooks = {
            name: [callback for callback in callbacks if overrides(callback, name)] for name in METHODS
        }
        self._feed = records.feed(rounds=bool(self._hooks["on_round"])) if any(self._hooks.values()) else None
        self._error: Callable[[], BaseException | None] = lambda: None
        self._thread: threading.Thread | None = None
        self._patience_s = patience_s
        self._inside = ""
        self._since_s = math.inf  # it is inside
        self._is_warned = False  # of the call that it is inside
        self._is_left_behind = False

    def start(
        self,
        run: object,
        error: Callable[[], BaseException | None],
        state: Callable[[], object],
        begins: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread, where there is anything to call.

        Args:
            run: Argument of `on_train_start`.
            error: The run's first failure; None while there is none.
            state: Returns the argument of `on_train_end` after a run without a failure. Called once, on the
                thread, when the run is over; it must not wait for the observer.
            begins: Waits until the run begins; False where its start was taken back, so nothing is called.
        """
        if self._feed is None:
            return
        self._error = error
        self._thread = threading.Thread(
            target=self._observe, args=(run, state, begins), name="flowdp-observer", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait until every callback has heard of the end; False where one does not return.

        Callbacks are the user's code and have their time, but a failure does not wait for them for long.

        Args:
            timeout_s: How long at most; None: as long as it takes, but 2 s once the run has failed.

        Threads:
            Any, after the run has ended; False at once on the observer's own.
        """
        if self._thread is None:
            return True
        if self.is_own_thread() or (self._is_left_behind and self._thread.is_alive()):
            return False
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive():
            now = time.monotonic()
            if self._error() is not None:
                end = min(end, now + GRACE_S)
            if not self._is_warned and self.late:
                self._is_warned = True
                log.warning("%s, and the run waits for it; it is here:\n%s", self.late, self.stack)
            if now >= end:
                self._leave_behind()
                return False
            self._thread.join(min(LISTEN_S, end - now))
        return True

    def is_own_thread(self) -> bool:
        """Whether the calling thread is the observer's."""
        return threading.current_thread() is self._thread

    @property
    def inside(self) -> str:
        """The method that is being called, as "Class.method"; "" between two."""
        return self._inside

    @property
    def late(self) -> str:
        """The call that has taken longer than it may, in words; "" where none has."""
        inside, seconds = self._inside, time.monotonic() - self._since_s
        is_late = bool(inside) and self._patience_s is not None and seconds > self._patience_s
        return f"{inside} has not returned for {seconds:.1f} s" if is_late else ""

    @property
    def stack(self) -> str:
        """Python stack of the thread; "" if it does not run."""
        return "".join(stacks([self._thread]).values()) if self._thread is not None else ""

    @property
    def complaints(self) -> tuple[str, ...]:
        """Problems of the callbacks so far, but for exceptions: lost records, a call that hangs."""
        lost = 0 if self._feed is None else self._feed.dropped
        slow = [f"callbacks were slower than the run: {lost} records went by unseen"] if lost else []
        return (*slow, *([late] if (late := self.late) else []))

    def _observe(self, run: object, state: Callable[[], object], begins: Callable[[], bool]) -> None:
        """The body of the thread."""
        if not begins():
            return
        assert self._feed is not None
        self._call("on_train_start", run)
        while waiting := deque(self._feed.take()):
            while waiting:  # none is kept longer than it takes: a checkpoint holds the whole model
                self._tell(waiting.popleft())
        if self._feed.dropped:
            log.warning("callbacks were slower than the run: %d records went by unseen", self._feed.dropped)
        error = self._error()
        if error is not None:
            self._call("on_exception", error)
        self._call("on_train_end", None if error is not None else self._ask(state))

    def _tell(self, record: Record) -> None:
        if isinstance(record, RoundEnded):
            self._call("on_round", record)
        elif isinstance(record, EpochStarted):
            self._call("on_epoch_start", record.epoch)
        elif isinstance(record, EpochMetrics):
            self._call("on_epoch_end", record)
        elif isinstance(record, EvaluationEnded):
            self._call("on_evaluation", record)
        else:
            self._call("on_checkpoint", record)

    def _call(self, method: str, argument: Any) -> None:
        for callback in self._hooks[method]:
            self._since_s = time.monotonic()
            self._inside = f"{type(callback).__name__}.{method}"
            self._is_warned = False
            try:
                getattr(callback, method)(argument)
            except BaseException as error:
                self._complain(callback, method, error)
            self._inside = ""

    def _ask(self, state: Callable[[], object]) -> object:
        """The run's answer; None where it cannot be read, which `join()` raises."""
        try:
            return state() if self._hooks["on_train_end"] else None
        except Exception:
            log.exception("the state of the run cannot be read for its callbacks")
            return None

    def _complain(self, callback: Callback, method: str, error: BaseException) -> None:
        text = f"{self._inside} raised {format_error(error)}"
        if not self._records.complain(text, (id(callback), method)):
            return
        if not callback.ends_run:
            log.error("%s; the run does not end by it", text, exc_info=folded(error))
            return
        log.error("%s; it ends the run", text, exc_info=folded(error))
        failure = FlowdpError(text)
        failure.__cause__ = error
        self._fail(failure)

    def _leave_behind(self) -> None:
        if self._error() is not None:
            self._is_left_behind = True
            log.warning(
                "%s does not return, and the run has failed; it is here:\n%s",
                self.inside or "a callback",
                self.stack,
            )
