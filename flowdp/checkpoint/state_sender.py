"""The outlet of a machine that follows: what its ranks have saved goes to machine 0 when that asks for it."""

from __future__ import annotations

import logging
from collections import deque

from flowdp.checkpoint.machine_states import DroppedStates, SentStates, WantedStates
from flowdp.checkpoint.writer import Job, Outlet
from flowdp.errors import CollectiveError
from flowdp.network.transfer import Transfer
from flowdp.policy.formats import format_error

__all__ = ["StateSender"]

log = logging.getLogger("flowdp")


class StateSender(Outlet):
    """Keeps what the ranks of this machine have saved until machine 0 asks for it, or drops it.

    Args:
        transfer: The way to machine 0.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._wanted: deque[int] = deque()
        self._dropped: set[int] = set()  # before they were kept
        self._is_lost = False

    def queue(self, job: Job) -> None:
        """Keep a job until it is asked for. See `Outlet.queue`."""
        with self._changed:
            if job.capture not in self._dropped and not self._is_lost:
                self._pending.append(job)
            self._changed.notify_all()

    def take(self, message: WantedStates | DroppedStates) -> None:
        """Take a message of machine 0.

        Threads:
            Any. Does not block.
        """
        with self._changed:
            if isinstance(message, WantedStates):
                self._wanted.append(message.capture)
            else:
                self._dropped.update(message.captures)
                self._pending = [job for job in self._pending if job.capture not in self._dropped]
            self._changed.notify_all()

    def lose(self) -> None:
        """Note that machine 0 is gone: it asks for nothing more.

        Threads:
            Any. Does not block.
        """
        with self._changed:
            self._is_lost = True
            self._pending.clear()
            self._changed.notify_all()

    def close_transfer(self) -> None:
        """See `Outlet.close_transfer`."""
        self._transfer.close()

    def _run(self) -> None:
        """See `Outlet`."""
        while (capture := self._next_wanted()) is not None:
            with self._changed:
                job = next((job for job in self._pending if job.capture == capture), None)
            try:
                self._send(capture, job)
            except CollectiveError as error:
                log.warning("%s", error)
                self.lose()
            with self._changed:
                self._pending = [other for other in self._pending if other is not job]

    def _next_wanted(self) -> int | None:
        """Number of the next capture to send; None: there is none any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_lost or bool(self._wanted) or (self._is_closed and not self._pending)
            )
            if self._is_lost or not self._wanted:
                return None
            capture = self._wanted.popleft()
            # The word that it is to be kept may be behind the one that asks for it.
            self._changed.wait_for(
                lambda: (
                    self._is_closed or self._is_lost or any(job.capture == capture for job in self._pending)
                )
            )
            return None if self._is_lost else capture

    def _send(self, capture: int, job: Job | None) -> None:
        if job is None:
            answer = SentStates(capture, (), "its run ended before they were there")
        else:
            try:
                answer = SentStates(capture, job.captured.read()["ranks"])
            except Exception as error:
                answer = SentStates(capture, (), format_error(error))
        try:
            self._transfer.send(answer, 0)
        except CollectiveError:
            raise
        except Exception as error:  # an optimizer's state that cannot be pickled; nothing was sent
            self._transfer.send(SentStates(capture, (), format_error(error)), 0)
