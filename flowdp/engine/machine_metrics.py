"""Metrics of an evaluation by several machines: their states meet on machine 0, which computes the values."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flowdp.engine.metrics import Parts, States

__all__ = ["MachineMetrics", "MetricsMeeting"]


@dataclass(frozen=True, slots=True)
class MachineMetrics:
    """Metrics of one machine behind an evaluation, on their way to machine 0.

    Attributes:
        evaluation: Index of the evaluation.
        end: Batches of the evaluation, of all machines.
        means: Names of its means.
        states: States of its ranks by the names of the metrics, pickled.
    """

    evaluation: int
    end: int
    means: frozenset[str]
    states: bytes


class MetricsMeeting:
    """Place where the metrics of all machines meet behind an evaluation.

    Args:
        machine: Number of this machine.

    Attributes:
        send: On a machine that follows, sends its metrics to machine 0, in front of all that it sends later;
            does not block.

    Threads:
        The workers, and those of the links to other machines.
    """

    send: Callable[[MachineMetrics], None]

    def __init__(self, machine: int) -> None:
        self._machine = machine
        self._lock = threading.Lock()  # guards everything below
        self._own: dict[int, tuple[int, frozenset[str], Parts]] = {}  # by evaluation
        self._others: dict[int, dict[int, MachineMetrics]] = {}  # by evaluation and machine

    def bring(self, evaluation: int, end: int, means: Collection[str], parts: Parts) -> None:
        """Bring the metrics of this machine.

        Args:
            evaluation: Index of the evaluation.
            end: Batches of it, of all machines.
            means: Names of its means.
            parts: Metrics of this machine's ranks.

        Threads:
            The worker that comes last.
        """
        if self._machine:
            states = {name: ranks for name, (_, ranks) in parts.items()}
            content = pickle.dumps(states, pickle.HIGHEST_PROTOCOL)
            self.send(MachineMetrics(evaluation, end, frozenset(means), content))
            return
        with self._lock:
            self._own = {evaluation: (end, frozenset(means), parts)}

    def take(self, machine: int, metrics: MachineMetrics) -> None:
        """Take those of another machine."""
        with self._lock:
            # One that was cut short is never merged.
            self._others = {number: of for number, of in self._others.items() if number >= metrics.evaluation}
            self._others.setdefault(metrics.evaluation, {})[machine] = metrics

    def end(self, evaluation: int) -> tuple[int, frozenset[str], Parts]:
        """Batches, names of the means, and metrics of all machines; the meeting is over.

        Raises:
            TypeError: Another machine has a metric that machine 0 has not updated.

        Threads:
            The worker of a rank of machine 0.
        """
        with self._lock:
            end, means, parts = self._own.pop(evaluation, (0, frozenset(), {}))
            others = self._others.pop(evaluation, {})
        found: Parts = {name: (metric, list(ranks)) for name, (metric, ranks) in parts.items()}
        for _, other in sorted(others.items()):
            end, means = max(end, other.end), means | other.means
            states: dict[str, list[States]] = pickle.loads(other.states)
            for name, ranks in states.items():
                if name not in found:
                    raise _missing(name)
                found[name][1].extend(ranks)
        if not found:  # this is not machine 0, which has none at all
            raise _missing(None)
        return end, means, found


def _missing(name: str | None) -> TypeError:
    what = "metrics of the evaluation were" if name is None else f"the metric {name!r} was"
    return TypeError(
        f"{what} updated on another machine and not on machine 0, which computes the values: return the same "
        "metrics for every batch"
    )
