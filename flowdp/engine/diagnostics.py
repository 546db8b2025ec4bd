"""Activity of all ranks as seen from another thread, without asking or disturbing any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flowdp.data.source import Source
from flowdp.engine.machine_links import FollowerLink, LeaderLink
from flowdp.engine.worker_thread import Worker
from flowdp.errors import StallError
from flowdp.network.channel import Sign
from flowdp.policy.formats import format_indices
from flowdp.protocol.commands import Quarantined
from flowdp.threads.gate import Gate, Waiting
from flowdp.threads.stacks import stacks

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
        sources: The datasets; that of the training, which names the samples of a batch, is the first.
        tail: The last so many events of the coordinator, as text.
        link: Has signs of life of the other machines, of whose ranks nothing else is known here; None: there
            are none.

    Threads:
        Any. Facts about different ranks are of close moments, not of the same moment.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        gate: Gate,
        sources: Sequence[Source],
        tail: Callable[[int], list[str]],
        link: LeaderLink | FollowerLink | None = None,
    ) -> None:
        self._workers = workers
        self._gate = gate
        self._sources = sources
        self._tail = tail
        self._link = link

    def sign(self) -> Sign:
        """Sign of life of this machine's ranks.

        It counts what moves between two rounds. A meeting is none of it: ranks that wait for data may meet
        again and again with nothing to bring.
        """
        waiting = self._gate.waiting()
        return Sign(
            sum(
                worker.current.local_step + (worker.activity.moves if worker.activity.task else 0)
                for worker in self._workers
            ),
            max(worker.activity.longest_ms for worker in self._workers),
            # Ended its first step, or is in none and waits for no batch.
            all(
                worker.activity.has_left
                # At the gate, the rank's own part of the step has been counted before.
                or (worker.activity.moves if worker.replica.steps_at_gate else worker.current.local_step) > 0
                or worker.parts.rank in waiting
                or (worker.step is None and worker.activity.awaited is None)
                for worker in self._workers
            ),
        )

    def all_signs(self) -> Sign:
        """Sign of life of the ranks of all machines together."""
        return sum(() if self._link is None else self._link.signs, self.sign())

    def stall_error(self, seconds: float, threads: Iterable[threading.Thread]) -> StallError:
        """Error of a run in which nothing has moved for so long; see `report`."""
        return self.report(
            f"nothing has moved for {seconds:.1f} s; where a step or a read of the dataset may take that "
            "long, give a larger stall_timeout, or None",
            threads,
        )

    def report(self, headline: str, threads: Iterable[threading.Thread], events: int = EVENTS) -> StallError:
        """All that is known at this moment: ranks, stacks, the last events; as an error, and its text.

        Args:
            headline: The first line.
            threads: All threads of the run, the readers of its datasets included.
            events: Number of events.
        """
        waiting, running = self._gate.waiting(), stacks(threads)
        ranks = [_doing(worker, waiting.get(worker.parts.rank)) for worker in self._workers]
        parts = [headline, *(f"  rank {rank}: {doing}" for rank, doing in enumerate(ranks))]
        parts += [f"  reader: {doing}" for source in self._sources if (doing := source.waits_for())]
        parts += [f"\n{name} is here:\n{stack.rstrip()}" for name, stack in running.items()]
        parts += ["\nThe last events:", *(f"  {event}" for event in self._tail(events))]
        return StallError("\n".join(parts), ranks=ranks, stacks=running)

    def quarantined(self, command: Quarantined) -> str:
        """Text about a replica that had NaN or infinite numbers: which, and since which batch."""
        here = {worker.parts.rank: f" on {worker.current.device}" for worker in self._workers}
        text = (
            f"rank {command.rank}{here.get(command.rank, '')} had NaN or infinite numbers: it was left out "
            "of the mean, and goes on from the other replicas"
        )
        if command.batch is None:
            return text
        epoch, batch = command.batch
        indices = self._sources[0].indices(epoch, batch)
        shown = format_indices(indices)
        return f"{text}. The first were those of batch {batch + 1} of epoch {epoch + 1} (indices {shown})"


def _doing(worker: Worker, waiting: Waiting | None) -> str:
    """A worker's activity in words; `waiting`: its wait in the gate."""
    step = worker.step
    if worker.activity.has_left:
        return "has left"
    if waiting is not None:
        where = f"at the gate in round {waiting.round}"
        if waiting.missing:
            who = f"{where}, waiting for ranks {', '.join(map(str, waiting.missing))}"
            return f"{who} to finish the averaging" if waiting.decided else who
        return (
            f"{where}, whose averaging is being launched" if waiting.decided else f"{where} of all machines"
        )
    if worker.activity.task:
        return worker.activity.task
    if worker.activity.awaited is not None:
        epoch, batch = worker.activity.awaited
        return f"waiting for data: batch {batch + 1} of epoch {epoch + 1}"
    if step is not None:
        return f"in a step (epoch {step.epoch + 1}, batch {step.batches[0] + 1})"
    throttled = worker.machine.throttled
    return "idle" if throttled is None else f"idle: {throttled}"
