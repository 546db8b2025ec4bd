"""Requests of the user, and errors from outside a run's threads, on their way to the coordinator."""

from __future__ import annotations

import threading
from functools import partial

from flowdp.engine.failures import Failures
from flowdp.engine.signals import SigtermStop
from flowdp.errors import FlowdpError
from flowdp.observe.records import Records
from flowdp.protocol.messages import CheckpointWritten, Fact, Failed, Requested
from flowdp.threads.inbox import Inbox

__all__ = ["Requests"]


class Requests:
    """The coordinator's inbox, and the requests in it.

    Args:
        records: Records of the run; a run that is over takes no requests.
        failures: Failures of the run.

    Attributes:
        inbox: Inbox of the coordinator's thread.

    Threads:
        Any.
    """

    def __init__(self, records: Records, failures: Failures) -> None:
        self.inbox: Inbox[Fact] = Inbox()
        self._records = records
        self._failures = failures
        self._count = self._snapshots = 0
        self._sigterm: SigtermStop | None = None
        self._lock = threading.Lock()  # numbers the requests in the order in which the inbox has them

    def request(self, what: Requested) -> int:
        """Send a request to the coordinator; returns its number, from 1, or 0 where the run is over."""
        with self._lock:
            is_live = self._post(what)
            self._count += is_live
            return self._count if is_live else 0

    def hear_sigterm(self) -> None:
        """Take the next SIGTERM as a request to stop, until `close`.

        Raises:
            OptionError: See `SigtermStop`.

        Threads:
            The main one.
        """
        self._sigterm = SigtermStop(partial(self.request, Requested("stop", "SIGTERM")))

    def close(self) -> None:
        """Hear no SIGTERM any more; may be called again, for the main thread to put its handler back."""
        if self._sigterm is not None:
            self._sigterm.close()

    def snapshot(self) -> int:
        """Request a snapshot; returns its number among the snapshots."""
        with self._lock:
            self._snapshots += 1
            self._count += self._post(Requested("snapshot"))
            return self._snapshots

    def written(self, version: int) -> None:
        """Tell the coordinator that the writer is done with a checkpoint; one that is gone hears nothing."""
        with self._lock:
            self._post(CheckpointWritten(version))

    def fail(self, error: FlowdpError, *, is_awaited: bool = True) -> None:
        """End the run by an error that none of its ranks has raised; see `Failures.add`."""
        words = self._failures.add(error, is_awaited=is_awaited)
        with self._lock:
            self._post(Failed(words))

    def _post(self, fact: Fact) -> bool:
        if is_live := not self._records.is_over:
            self.inbox.post(fact)
        return is_live
