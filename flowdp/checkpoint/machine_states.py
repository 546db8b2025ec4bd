"""States of the ranks of all machines, in the file that machine 0 writes.

A machine that follows keeps what its ranks have saved, by the number of the capture. Machine 0 asks for a
capture when its writer comes to it, and names those that it does not write.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowdp.errors import CheckpointError, CollectiveError
from flowdp.network.transfer import Transfer
from flowdp.policy.formats import format_error

__all__ = ["DroppedStates", "StateCollector", "StateSender", "WantedStates"]

log = logging.getLogger("flowdp")

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WantedStates:
    """Machine 0 writes this capture, and waits for the states of the other machines.

    Attributes:
        capture: Number of the capture.
    """

    capture: int


@dataclass(frozen=True, slots=True)
class DroppedStates:
    """Captures that are not written.

    Attributes:
        captures: Their numbers.
    """

    captures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """States of one machine at a capture.

    Attributes:
        capture: Number of the capture.
        states: Of its ranks; empty where they cannot be read.
        error: Why they cannot.
    """

    capture: int
    states: Sequence[State]
    error: str | None = None


class StateCollector:
    """Gathers the states of the other machines on machine 0.

    Args:
        transfer: The way that they take.
        tell: Sends a message to all other machines; does not block.
    """

    def __init__(self, transfer: Transfer, tell: Callable[[WantedStates | DroppedStates], None]) -> None:
        self._transfer, self._tell = transfer, tell

    def collect(self, capture: int) -> list[State]:
        """States of the ranks of all other machines at a capture, in the order of the ranks.

        Raises:
            CheckpointError: A machine was lost, or cannot read them.

        Threads:
            The writer's. It waits for the other machines.
        """
        self._tell(WantedStates(capture))
        try:
            answers = [self._receive(capture, machine) for machine in self._transfer.others]
        except CollectiveError as error:
            raise CheckpointError(f"the checkpoint lacks states of other machines: {error}") from error
        for machine, answer in zip(self._transfer.others, answers, strict=True):
            if answer.error is not None:
                raise CheckpointError(
                    f"the checkpoint lacks the states of {self._transfer.name(machine)}: {answer.error}"
                )
        return [state for answer in answers for state in answer.states]

    def drop(self, captures: Sequence[int]) -> None:
        """Tell the other machines that these are not written.

        Threads:
            Any. Does not block.
        """
        if captures:
            self._tell(DroppedStates(tuple(captures)))

    def give_back(self) -> None:
        """Give the way of the states back; once.

        Threads:
            The coordinator's, when nothing is written any more.
        """
        self._transfer.close()

    def _receive(self, capture: int, machine: int) -> _Answer:
        while True:
            answer: _Answer = self._transfer.receive(machine)
            if answer.capture == capture:  # else of one that this machine has given up
                return answer


class StateSender:
    """Keeps the states of a machine that follows until machine 0 asks for them.

    Args:
        transfer: The way that they take.

    Attributes:
        thread: Sends them.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._changed = threading.Condition()  # guards everything below
        self._kept: dict[int, Callable[[], Sequence[State]]] = {}
        self._wanted: deque[int] = deque()
        self._dropped: set[int] = set()  # before they were kept
        self._is_closed = self._is_over = False
        self.thread = threading.Thread(target=self._run, name="flowdp-checkpoint", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether machine 0 may still ask for something."""
        with self._changed:
            return bool(self._kept)

    def keep(self, capture: int, read: Callable[[], Sequence[State]]) -> None:
        """Keep the states of a capture that machine 0 is going to write.

        Args:
            capture: Number of the capture.
            read: Waits for the devices, and returns the states of the ranks in their order.

        Threads:
            The coordinator's.
        """
        with self._changed:
            if capture in self._dropped:
                self._dropped.discard(capture)
            elif not self._is_over:
                self._kept[capture] = read
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
                for capture in message.captures:
                    if self._kept.pop(capture, None) is None:
                        self._dropped.add(capture)
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Send what machine 0 may still ask for, and end the thread; False where it is not done in time.

        Threads:
            The coordinator's, when it keeps no more.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def give_back(self) -> None:
        """Give the way of the states back, behind `close`; once.

        Threads:
            The coordinator's.
        """
        self._transfer.close()

    def end(self) -> None:
        """Note that machine 0 is gone: it asks for nothing more.

        Threads:
            Any. Does not block.
        """
        with self._changed:
            self._is_over = True
            self._kept.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        """The body of the thread."""
        while (capture := self._next()) is not None:
            try:
                self._send(capture)
            except CollectiveError as error:
                log.warning("%s", error)
                self.end()
            with self._changed:
                self._kept.pop(capture, None)

    def _next(self) -> int | None:
        """Number of the next capture to send; None: there is none any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or bool(self._wanted) or (self._is_closed and not self._kept)
            )
            if self._is_over or not self._wanted:
                return None
            capture = self._wanted.popleft()
            # The word that it is to be kept may be behind the one that asks for it.
            self._changed.wait_for(lambda: capture in self._kept or self._is_closed or self._is_over)
            return None if self._is_over else capture

    def _send(self, capture: int) -> None:
        answer = self._answer(capture)
        try:
            self._transfer.send(answer, 0)
        except CollectiveError:
            raise
        except Exception as error:  # an optimizer's state that cannot be pickled; nothing was sent
            self._transfer.send(_Answer(capture, (), format_error(error)), 0)

    def _answer(self, capture: int) -> _Answer:
        with self._changed:
            read = self._kept.get(capture)
        if read is None:
            return _Answer(capture, (), "its run ended before they were there")
        try:
            return _Answer(capture, read())
        except Exception as error:
            return _Answer(capture, (), format_error(error))
