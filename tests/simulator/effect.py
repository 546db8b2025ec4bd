"""The judge of what training has come to: every batch once in effect, over all lives of a run.

A step has no effect any more when its rank is lost before a mean holds it, and when the run goes on from a
position that was saved before it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from flowdp.machine.worker import Step
from flowdp.policy.monitor import Best
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

__all__ = ["Effect", "Memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """What had come of a run when it was saved.

    Attributes:
        trained: How often each (epoch, batch) was.
        steps_in: Steps of all ranks in each epoch.
        global_step: Of the means.
        epochs: Complete ones.
        round: Number of the next.
        versions: Checkpoints.
        best: Of what early stopping watches.
        owed_epoch: The record of the last epoch, where a stop has taken its evaluation.
        owed_step: A stop has taken an evaluation by steps.
    """

    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    steps_in: Counter[int] = field(default_factory=Counter)
    global_step: int = 0
    epochs: int = 0
    round: int = 0
    versions: int = 0
    best: Best = field(default_factory=Best)
    owed_epoch: EpochMetrics | None = None
    owed_step: bool = False


class Effect:
    """Counts what was trained.

    Args:
        scenario: The run.
        memory: What had come of the one that it continues.

    Attributes:
        trained: How often each (epoch, batch) was, in effect.
        steps_in: Steps of all ranks in each epoch.
        steps: Steps of each rank. Shape (world_size,).
        credited: Those of them that a mean holds. Shape (world_size,).
        samples: Of the steps that no mean holds. Shape (world_size,).
    """

    def __init__(self, scenario: Scenario, memory: Memory) -> None:
        world_size = scenario.config.world_size
        self._scenario = scenario
        self._is_exact = scenario.config.policy == "exact" and world_size > 1
        self.trained = memory.trained.copy()
        self.steps_in = memory.steps_in.copy()
        self.steps = [0] * world_size
        self.credited = [0] * world_size
        self.samples = [0] * world_size
        self._first_step = memory.global_step
        self._own: list[list[tuple[Step, int]]] = [[] for _ in range(world_size)]  # what no mean holds
        self._lost: set[tuple[int, int]] = set()  # went with its rank
        self._before = sum(memory.trained.values())

    @property
    def global_step(self) -> int:
        """Steps of all ranks, over all lives."""
        taken = sum(self.trained.values()) - self._before if self._is_exact else sum(self.steps)
        return self._first_step + taken

    def uncredited(self, rank: int) -> int:
        """Steps of a rank that no mean holds."""
        return self.steps[rank] - self.credited[rank]

    def stepped(self, rank: int, step: Step) -> int:
        """A rank has taken a step; returns its samples."""
        self.steps[rank] += 1
        self.steps_in[step.epoch] += 1
        if step.part is not None:
            samples = step.part.samples
        else:
            samples = 0
            for batch in step.batches:
                self.is_trained(step.epoch, batch)
                samples += self._scenario.samples_in(step.epoch, batch)
        self.samples[rank] += samples
        self._own[rank].append((step, samples))
        return samples

    def is_trained(self, epoch: int, batch: int) -> None:
        """A batch was trained, or a window by all together."""
        self.trained[epoch, batch] += 1
        if self.trained[epoch, batch] > 1:
            rule = "S20" if (epoch, batch) in self._lost else "S1"
            raise Violation(rule, f"batch {batch} of epoch {epoch} was trained twice")

    def met(self, rank: int, steps: int) -> None:
        """A mean holds the oldest so many steps of a rank."""
        self.credited[rank] += steps
        self.samples[rank] -= sum(samples for _, samples in self._own[rank][:steps])
        del self._own[rank][:steps]

    def lose(self, rank: int) -> None:
        """A rank is lost, and with it all that no mean holds."""
        lost, self._own[rank] = self._own[rank], []
        for step, _ in lost:
            self.steps_in[step.epoch] -= 1
            for batch in step.batches:
                self.trained[step.epoch, batch] -= 1
                self._lost.add((step.epoch, batch))
        self.steps[rank] = self.credited[rank]
        self.samples[rank] = 0

    def judge_missing(self, expected: set[tuple[int, int]]) -> None:
        """A run is complete: nothing else was trained, and nothing was left out."""
        there = {key for key, count in self.trained.items() if count}
        if there != expected:
            raise Violation(
                "S1",
                f"{len(expected - there)} batches were never trained, {len(there - expected)} are of none",
            )

    def judge_lost(self, epoch: int) -> None:
        """An epoch is complete: others have trained what was lost with a rank."""
        missing = [key for key in self._lost if key[0] == epoch and not self.trained[key]]
        if missing:
            raise Violation("S20", f"{missing} went with their rank, and nobody trained them again")

    def judge_position(self, position: Position) -> None:
        """A position says what was trained and is in the means, and nothing else."""
        if self.steps != self.credited:
            raise Violation("S19", f"steps {self.steps} were taken, means hold {self.credited}: {position}")
        if position.global_step != self.global_step:
            raise Violation("S19", f"{self.global_step} steps were taken, not those of {position}")
        trained: dict[int, set[int]] = {}
        for (epoch, batch), count in self.trained.items():
            if count:
                trained.setdefault(epoch, set()).add(batch)
        said = {epoch: self._scenario.numbers(epoch) for epoch in range(position.done)}
        for one in position.open:
            said[one.epoch] = set(range(one.position)).difference(one.missing)
            steps, samples = (
                sum(part) for part in zip(*((s.steps, s.samples) for s in one.sums), strict=True)
            )
            true = sum(self._scenario.samples_in(one.epoch, batch) for batch in said[one.epoch])
            if (steps, samples) != (self.steps_in[one.epoch], true):
                raise Violation("S19", f"{one} holds {steps} steps and {samples} samples of {true}")
        for epoch in trained.keys() | said.keys():
            if trained.get(epoch, set()) != said.get(epoch, set()):
                raise Violation("S19", f"other batches of epoch {epoch} were trained than {position} says")
