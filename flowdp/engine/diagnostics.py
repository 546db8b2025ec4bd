"""Activity of all ranks as seen from another thread, without asking or disturbing any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flowdp.data.source import Source
from flowdp.engine.machine_links import FollowerLink, LeaderLink
from flowdp.engine.stacks import describe_rank, describe_run, stacks
from flowdp.engine.worker_thread import Worker
from flowdp.errors import StallError
from flowdp.network.channel import Sign
from flowdp.policy.formats import format_indices
from flowdp.protocol.commands import Quarantined
from flowdp.threads.gate import Gate

__all__ = ["Diagnostics", "Progress"]

EVENTS = 50
"""The last events of the event log that a report shows."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a rank.

    Attributes:
        steps: Steps of the rank so far.
        throttled: Why it may take no step; None where it may.
        pieces: Number of pieces that its micro-batches are cut into.
        capture: How its steps run, as of `Captured.state`; None: they cannot be captured.
        uncaptured: Why its steps are not captured, where they were to be.
    """

    steps: int
    throttled: str | None
    pieces: int
    capture: str | None = None
    uncaptured: str | None = None


class Diagnostics:
    """Observer of workers, gate and threads.

    Args:
        workers: One per rank.
        gate: Where they meet.
        source: Names the samples of a batch.
        threads: Gives all threads of the run, the readers of its datasets included.
        tail: The last so many events of the coordinator, as text.
        steps_at_gate: The optimizers step there, all alike ("exact").
        readers: Returns descriptions of the waits of all dataset readers.
        link: Link to the other machines, of whose ranks only signs of life are known here; None: there are
            none.

    Threads:
        Any. Facts about different ranks are of close moments, not of the same moment.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        gate: Gate,
        source: Source,
        threads: Callable[[], Iterable[threading.Thread]],
        tail: Callable[[int], list[str]],
        *,
        steps_at_gate: bool = False,
        readers: Callable[[], list[str]] = list,
        link: LeaderLink | FollowerLink | None = None,
    ) -> None:
        self._link = link
        self._workers = workers
        self._gate = gate
        self._source = source
        self._threads = threads
        self._tail = tail
        self._steps_at_gate = steps_at_gate
        self._readers = readers

    def progress(self) -> list[int]:
        """Counters of all that moves between two rounds: two of each rank here, one of each link.

        A meeting is none of it: ranks that wait for data may meet again and again with nothing to bring.
        """
        return self._moves() + [sign.moves for sign in self._signs()]

    def _moves(self) -> list[int]:
        return [
            count
            for worker in self._workers
            for count in (worker.current.local_step, worker.moves if worker.task else 0)
        ]

    def sign(self) -> Sign:
        """Sign of life of this machine's ranks."""
        return Sign(sum(self._moves()), self._longest_ms(), self._has_started())

    def _signs(self) -> Sequence[Sign]:
        return () if self._link is None else self._link.signs

    def have_all_started(self) -> bool:
        """Whether every rank has ended its first step, or is in none and waits for no batch."""
        return self._has_started() and all(sign.has_started for sign in self._signs())

    def _has_started(self) -> bool:
        waiting = self._gate.waiting()
        return all(
            worker.has_left
            or self._has_stepped(worker)
            or worker.rank in waiting
            or (worker.step is None and worker.awaited is None)
            for worker in self._workers
        )

    def _has_stepped(self, worker: Worker) -> bool:
        # At the gate, the rank's own part of the step has been counted before.
        return (worker.moves if self._steps_at_gate else worker.current.local_step) > 0

    def longest_ms(self) -> float:
        """The longest step of any rank in the orders that have ended."""
        return max([self._longest_ms(), *(sign.longest_ms for sign in self._signs())])

    def _longest_ms(self) -> float:
        return max(worker.longest_ms for worker in self._workers)

    def ranks(self) -> list[str]:
        """Descriptions of each rank's activity. Shape (world_size,)."""
        waiting = self._gate.waiting()
        told = []
        for worker in self._workers:
            step = worker.step
            told.append(
                describe_rank(
                    has_left=worker.has_left,
                    waiting=waiting.get(worker.rank),
                    awaited=worker.awaited,
                    step=None if step is None else (step.epoch, step.batches[0]),
                    task=worker.task or None,
                    idle=worker.machine.throttled,
                )
            )
        return told

    def report(self, headline: str, events: int = EVENTS) -> str:
        """All that is known at this moment: ranks, stacks, the last events."""
        return describe_run(
            headline, self.ranks(), stacks(self._threads()), self._tail(events), self._readers()
        )

    def stall_error(self, seconds: float) -> StallError:
        """Error of a run in which nothing has moved for so long."""
        headline = (
            f"nothing has moved for {seconds:.1f} s; where a step or a read of the dataset may take that "
            "long, give a larger stall_timeout, or None"
        )
        ranks, found = self.ranks(), stacks(self._threads())
        report = describe_run(headline, ranks, found, self._tail(EVENTS), self._readers())
        return StallError(report, ranks=ranks, stacks=found)

    def quarantined(self, command: Quarantined) -> str:
        """Text about a replica that had NaN or infinite numbers: which, and since which batch."""
        named = [f" on {one.current.device}" for one in self._workers if one.rank == command.rank]
        text = (
            f"rank {command.rank}{''.join(named)} had NaN or infinite numbers: it was left out of the mean, "
            "and goes on from the other replicas"
        )
        if command.batch is None:
            return text
        epoch, batch = command.batch
        indices = self._source.indices(epoch, batch)
        shown = format_indices(indices)
        return f"{text}. The first were those of batch {batch} of epoch {epoch} (indices {shown})"
