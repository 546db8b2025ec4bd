"""States of the ranks of all machines, in the file that machine 0 writes.

A machine that follows keeps what its ranks have saved, by the number of the capture. Machine 0 asks for a
capture when its writer comes to it, and names those that it does not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowdp.errors import CheckpointError, CollectiveError
from flowdp.network.transfer import Transfer

__all__ = ["DroppedStates", "SentStates", "StateCollector", "WantedStates"]

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
class SentStates:
    """States of one machine at a capture, on their way to machine 0.

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

    def _receive(self, capture: int, machine: int) -> SentStates:
        while True:
            answer: SentStates = self._transfer.receive(machine)
            if answer.capture == capture:  # else of one that this machine has given up
                return answer
