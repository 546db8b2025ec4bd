"""A virtual cluster of several machines: a gate on each, and links to the one that leads.

Machine 0 has the coordinator and the gate of all ranks. Arrivals, outcomes, facts and orders of the others
cross their links, each first in, first out; inner rounds are decided where they are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flowdp.errors import ProtocolError
from flowdp.machine.coordinator import Coordinator
from flowdp.protocol.gate import GateState, PartState
from flowdp.protocol.messages import Arrival, BarrierTask, Fact, Order, Outcome, Settle, TaskDone
from flowdp.sim.world import VirtualRank, World

__all__ = ["Links", "MachinesWorld"]


@dataclass(frozen=True, slots=True)
class Links:
    """Links between the machines of a virtual cluster.

    Attributes:
        latency_ms: Longest time of a message between machine 0 and each other. Shape (machines,).
        mean_ms: Time of one mean of all machines, beside the mean of each one's own replicas.
    """

    latency_ms: tuple[float, ...]
    mean_ms: float = 0.0


class MachinesWorld(World):
    """One run of a virtual cluster on one machine or, with links, on several.

    Args:
        coordinator: Machine of the run; its configuration says which ranks each machine has.
        gate: Machine of the gate of all ranks.
        ranks: Its ranks. Shape (world_size,).
        links: Links between the machines; None: there is one.
        part: Makes the gate of a machine.
        given: As of `World`.

    Attributes:
        machine_of: Machine of each rank. Shape (world_size,).
        parts: Gate of each machine; empty: there is one machine.
        links: As given.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        gate: GateState,
        ranks: Sequence[VirtualRank],
        *,
        links: Links | None = None,
        part: type[PartState] = PartState,
        **given: Any,
    ) -> None:
        super().__init__(coordinator, gate, ranks, **given)
        config = coordinator.config
        self.links = links
        self.machine_of = config.machine_of
        ends = list(accumulate(config.machines or (config.world_size,)))
        self._ranks = [range(start, stop) for start, stop in zip((0, *ends), ends, strict=False)]
        self.parts: list[PartState] = []
        if links is not None:
            self.parts = [
                part(self.ranks_of(machine), config.world_size) for machine in range(len(config.machines))
            ]
        self._concluded = 0  # machines that have the outcome of the round of all that is decided
        self._arrives_ms = 0.0  # the mean on its way, where it travels while the machines train
        self._settling: list[int] = []  # ranks that wait for it

    def ranks_of(self, machine: int) -> range:
        """Ranks of a machine."""
        return self._ranks[machine]

    # ------------------------------------------------------------------ links
    def travel(self, link: str, machine: int, act: Any, *args: object) -> None:
        """Let a message cross the link of a machine; to and from the one that leads there is none."""
        if self.links is None or machine == 0:
            self.clock.send((link, machine), act, *args)
            return
        extra_ms = self.links.latency_ms[machine] * self.rng.random()
        self.clock.send((link, machine), act, *args, extra_ms=extra_ms)

    def tell(self, fact: Fact, *link: object) -> None:
        """Send a fact to the coordinator over a link."""
        rank = link[1] if self.parts and len(link) == 2 and link[0] == "up" else 0
        if isinstance(rank, int) and self.machine_of[rank] > 0:
            self.travel("facts", self.machine_of[rank], self.handle, fact)
        else:
            super().tell(fact, *link)

    def send(self, number: int, order: Order) -> None:
        """Send an order to a rank."""
        if self.parts and self.machine_of[number] > 0:
            self.travel("orders", self.machine_of[number], self.deliver, number, order)
        else:
            super().send(number, order)

    # ------------------------------------------------------------------ gates
    def enter(self, number: int, arrival: Arrival) -> None:
        """A rank enters the gate of its machine, and goes on when its round has ended."""
        if not self.parts:
            super().enter(number, arrival)
            return
        rank, machine = self.ranks[number], self.machine_of[number]
        rank.state, rank.entered_ms = "gate", self.clock.now_ms
        part = self.parts[machine]
        outcome = part.enter(rank.machine.judged(arrival))
        if outcome is not None:
            self.meet(outcome)
        elif came := part.gathered:
            self.bring(machine, came)

    def bring(self, machine: int, came: Sequence[Arrival]) -> None:
        """All ranks of a machine stand in its gate, and their arrivals go to the gate of all."""
        if machine == 0:
            self.gather(came)
        else:
            self.travel("arrivals", machine, self.gather, came)

    def gather(self, came: Sequence[Arrival]) -> None:
        """The arrivals of a machine are at the gate of all; its outcome goes to all machines."""
        for arrival in came:
            outcome = self.gate.enter(arrival)
            if outcome is not None:
                self._concluded = 0
                for machine in range(len(self.parts)):
                    self.travel("outcomes", machine, self.conclude, machine, outcome)

    def conclude(self, machine: int, outcome: Outcome) -> None:
        """A machine has the outcome of a round of all; the mean begins when all have it."""
        self.parts[machine].conclude(outcome)
        self._concluded += 1
        if self._concluded == len(self.parts):
            self.meet(outcome)

    def averaging_ms(self, outcome: Outcome) -> float:
        """Time of the mean that begins now; of one that travels meanwhile, the rest of the one before."""
        if self.links is None:
            return super().averaging_ms(outcome)
        machines = {self.machine_of[member] for member in outcome.members}
        own_ms = self.sync_ms if len(outcome.members) > len(machines) else 0.0
        if outcome.inner:
            return own_ms
        if not self.coordinator.config.overlaps:
            return own_ms + self.links.mean_ms
        rest_ms = max(0.0, self._arrives_ms - self.clock.now_ms)
        self._arrives_ms = self.clock.now_ms + rest_ms + own_ms + self.links.mean_ms
        return own_ms + rest_ms

    # ------------------------------------------------------------------ means on their way
    def serve(self, number: int, task: BarrierTask) -> None:
        """A rank begins a barrier task."""
        if not isinstance(task, Settle):
            super().serve(number, task)
            return
        if self.links is None:
            raise ProtocolError(f"rank {number} got {task} in a run on one machine")
        self.ranks[number].state = "settling"
        self._settling.append(number)
        if len(self._settling) == len(self.ranks):
            rest_ms = max(0.0, self._arrives_ms - self.clock.now_ms)
            ranks, self._settling = self._settling, []
            for rank in ranks:
                self.clock.after(rest_ms + self.sync_ms, self.settled, rank)

    def settled(self, number: int) -> None:
        """The replica of a rank equals all others."""
        if self.ranks[number].state == "settling":
            self.ranks[number].state = "idle"
            self.tell(TaskDone(number), "up", number)
            self.proceed(number)
