"""The tasks of a barrier on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

from flowdp.protocol.messages import (
    BarrierTask,
    CopyReplica,
    Evaluate,
    Evaluation,
    SaveState,
    TaskDone,
)
from flowdp.sim.world import Clock
from tests.simulator.rules import Rules
from tests.simulator.scenario import Scenario

__all__ = ["Serving"]


class Serving:
    """Does what ranks are asked for while all stand still.

    Args:
        scenario: Batches of an evaluation, and the times.
        clock: Virtual time.
        rng: Source of the times and results.
        rules: Judge the batches that are evaluated, and the replicas that are healed.
        crashes: Called as `crashes(rank, act)` before each act; True: the rank has failed.
        answer: Called with the fact that tells of the end of a barrier task.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        rng: random.Random,
        rules: Rules,
        crashes: Callable[[int, str], bool],
        answer: Callable[[int, TaskDone], None],
    ) -> None:
        self._scenario = scenario
        self._clock = clock
        self._rng = rng
        self._rules = rules
        self._crashes = crashes
        self._answer = answer
        self._number = -1  # of the evaluation under way
        self._next = 0  # its first batch that nobody has taken
        self._is_cut = False
        self._results: dict[int, list[Evaluation]] = {}

    def serve(self, rank: int, task: BarrierTask) -> None:
        """A rank begins."""
        match task:
            case Evaluate():
                if task.number != self._number:
                    self._number, self._next, self._is_cut = task.number, 0, False
                self._results[rank] = []
                self._take(rank)
            case SaveState():
                if not self._crashes(rank, "capture"):
                    took_ms = self._rng.random() * self._scenario.capture_ms
                    self._clock.after(took_ms, self._answer, rank, TaskDone(rank))
            case CopyReplica():
                self._clock.after(self._scenario.sync_ms, self._adopted, rank, task.donor)

    def cut(self) -> None:
        """Deal no further batch of the evaluation under way."""
        self._is_cut = True

    def _take(self, rank: int) -> None:
        if self._crashes(rank, "evaluate"):
            return
        if self._is_cut or self._next == self._scenario.eval_batches:
            self._answer(rank, TaskDone(rank, tuple(self._results[rank])))
            return
        batch, self._next = self._next, self._next + 1
        self._clock.after((0.5 + self._rng.random()) * self._scenario.eval_ms, self._took, rank, batch)

    def _took(self, rank: int, batch: int) -> None:
        result = (batch, self._rng.randint(1, 8), (("score", round(self._rng.random(), 3)),))
        self._results[rank].append(result)
        self._rules.evaluated(result)
        self._take(rank)

    def _adopted(self, rank: int, donor: int) -> None:
        if rank != donor:
            self._rules.healed(rank)
        self._answer(rank, TaskDone(rank))
