"""The judge of rounds on two levels: those of one machine's ranks, and those of all machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flowdp.protocol.messages import Outcome
from tests.simulator.scenario import Scenario
from tests.simulator.violation import Violation

__all__ = ["Levels"]


class Levels:
    """Judges the weights of machines, and that an inner round is one of a whole machine and of no other.

    Args:
        scenario: The run.
    """

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.config
        self._machine_of = config.machine_of
        self._machines = range(len(config.machines))
        self._inner_rounds = config.inner_rounds
        self._since = [0] * config.world_size  # samples that inner means hold
        self._held = 0  # inner rounds of the slowest machine since the last one of all
        self._inner = [0] * len(config.machines)  # rounds in a row

    def ranks_of(self, machine: int) -> list[int]:
        """Ranks of a machine."""
        return [rank for rank, home in enumerate(self._machine_of) if home == machine]

    def judge_same(self, rank: int, outcome: Outcome, other: int, theirs: Outcome) -> None:
        """Two ranks have left the same round."""
        if theirs is outcome:
            return
        is_apart = self._machine_of[rank] != self._machine_of[other]
        if not (is_apart and outcome.inner and theirs.inner and outcome.round == theirs.round):
            raise Violation("S2", f"rank {rank} got {outcome}, another rank {theirs}")

    def held(self, outcome: Outcome, trained: Sequence[int], dead: Collection[int]) -> None:
        """A round was held.

        Args:
            outcome: Its outcome.
            trained: Samples of each rank that the mean holds, as far as hosts know. Shape (world_size,).
            dead: Machines without a finite replica before it.
        """
        if outcome.inner:
            self._judge_inner(outcome)
            for rank in outcome.members:
                self._since[rank] += trained[rank]
            return
        self._inner = [0] * len(self._inner)
        for machine in self._machines:
            self._judge_machine(machine, outcome, trained, machine in dead)
        self._since = [0] * len(self._since)

    def _judge_inner(self, outcome: Outcome) -> None:
        machine = self._machine_of[outcome.members[0]]
        self._inner[machine] += 1
        if list(outcome.members) != self.ranks_of(machine):
            raise Violation("S27", f"{outcome} is not one of the ranks {self.ranks_of(machine)}")
        if outcome.voids or outcome.stop or outcome.pause or outcome.halt or outcome.lr:
            raise Violation("S27", f"{outcome} decides for one machine alone")
        if self._inner[machine] >= self._inner_rounds:
            raise Violation("S27", f"{outcome} is inner round {self._inner[machine]} in a row")

    def _judge_machine(
        self,
        machine: int,
        outcome: Outcome,
        trained: Sequence[int],
        is_dead: bool,
    ) -> None:
        ranks = self.ranks_of(machine)
        weights = [outcome.weights[rank] for rank in ranks]
        true = [0 if is_dead else self._since[rank] + trained[rank] for rank in ranks]
        is_doubtful = all(rank in outcome.bad for rank in ranks)
        own = [outcome.samples[rank] for rank in ranks]
        if weights != true and not (is_doubtful and weights == own):
            raise Violation("S26", f"machine {machine} weighs {weights}, and has trained {true}: {outcome}")
        if any(weights) != any(outcome.local_weights(ranks)):
            raise Violation("S26", f"machine {machine} weighs {weights} with a mean of no replica: {outcome}")
