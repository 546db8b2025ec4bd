"""A virtual cluster: the production machines on a heap of virtual time, in one thread.

Links are first in, first out, with a drawn latency; steps take drawn times. All random numbers come from one
seed: the same cluster gives the same run. Nothing goes wrong here. Each thing that a rank, the gate or the
coordinator does is a method, so that a subclass can let it fail, and watch it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from flowdp.errors import ProtocolError
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import Apply, Done, Idle, Snapshot, Step, WorkerMachine
from flowdp.policy.tally import Work, pace_ms
from flowdp.protocol.commands import Average, Command, EpochMetrics, Finish, RoundEnded, Send
from flowdp.protocol.gate import GateState
from flowdp.protocol.messages import (
    Arrival,
    Averaged,
    BarrierTask,
    Checksum,
    Directives,
    Exiting,
    Fact,
    Leave,
    Order,
    Outcome,
    SnapshotReady,
    StepsDone,
    SyncAck,
    Tick,
    WorkerReady,
)

__all__ = ["Clock", "VirtualRank", "World"]


class Clock:
    """A heap of things that will happen; simultaneous ones happen in the order they were asked for.

    Args:
        rng: Source of the latencies.
        latency_ms: Longest time that a message takes.

    Attributes:
        now_ms: Virtual time.
        latency_ms: As given.
    """

    def __init__(self, rng: random.Random, latency_ms: float) -> None:
        self.now_ms = 0.0
        self._rng = rng
        self.latency_ms = latency_ms
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._links: dict[object, float] = {}

    def after(self, delay_ms: float, act: Callable[..., None], *args: object) -> None:
        """Call `act` when that much time has passed."""
        self._push(self.now_ms + delay_ms, act, args)

    def send(self, link: object, act: Callable[..., None], *args: object, extra_ms: float = 0.0) -> None:
        """Deliver over a link with a drawn latency: no message overtakes another on its link."""
        at_ms = self.now_ms + self._rng.random() * self.latency_ms + extra_ms
        at_ms = self._links[link] = max(at_ms, self._links.get(link, 0.0))
        self._push(at_ms, act, args)

    def advance(self) -> bool:
        """Let the next thing happen; False when nothing is left to happen."""
        if not self._heap:
            return False
        self.now_ms, _, act, args = heappop(self._heap)
        act(*args)
        return True

    def _push(self, at_ms: float, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._asked += 1
        heappush(self._heap, (at_ms, self._asked, act, args))


NOTHING = Work(0, 0, 0)


@dataclass
class VirtualRank:
    """The state of a worker thread around its machine.

    Attributes:
        machine: Machine of the rank.
        ms_per_step: Mean time of one step.
        inbox: Orders that it has not read.
        state: starting, idle, step, gate, busy (with a snapshot) or gone.
        sums: Its work since the last report.
        longest_ms: The longest step of it, with its wait for data.
        entered_ms: Time at which it last entered the gate.
        data_wait_ms: Time that it waited for the batch of the next step.
        trained_ms: Time of all its steps.
    """

    machine: WorkerMachine
    ms_per_step: float
    inbox: deque[Order] = field(default_factory=deque)
    state: str = "starting"
    sums: Work = NOTHING
    longest_ms: float = 0.0
    entered_ms: float = 0.0
    data_wait_ms: float = 0.0
    trained_ms: float = 0.0

    @property
    def is_listening(self) -> bool:
        """Whether an order that comes is read at once."""
        return self.state == "idle"

    def take_orders(self) -> None:
        """Let the machine take the orders of the inbox."""
        while self.inbox:
            self.machine.handle(self.inbox.popleft())

    def stepped(self, samples: int, ms: float) -> None:
        """A step is done."""
        self.machine.trained(samples)
        self.trained_ms += ms
        self.sums += Work(0, 1, samples, ms, self.data_wait_ms, losses=(1.0 * samples, samples))
        self.longest_ms = max(self.longest_ms, ms + self.data_wait_ms)
        self.data_wait_ms = 0.0

    def averaged(self, wait_ms: float = 0.0, sync_ms: float = 0.0) -> None:
        """Count a wait in the gate, or the time of a mean."""
        self.sums += replace(NOTHING, wait_ms=wait_ms, sync_ms=sync_ms)

    def work(self, done: Done) -> Work:
        """Everything since the last report as a record; counting starts again."""
        sums, longest_ms = self.sums, self.longest_ms
        self.sums, self.longest_ms = NOTHING, 0.0
        pace = pace_ms(sums.busy_ms + sums.data_ms, longest_ms, sums.steps)
        return replace(sums, epoch=done.epoch, steps=done.steps, pace_ms=pace)


class World:
    """One run of a virtual cluster.

    Args:
        coordinator: Machine of the run.
        gate: Machine of its gate.
        ranks: Its ranks. Shape (world_size,).
        seed: Seed of the random numbers.
        sync_ms: Time of one averaging.
        noise: Relative spread of a step's time.
        batch_size: Samples of a batch; in exact, those that a rank trains in its time of a step.
        latency_ms: Longest time that a message takes.

    Attributes:
        clock: Virtual time.
        rng: Source of all random numbers.
        finish: End of the run; None while it runs.
        records: Every record the coordinator reported.
        facts: Every fact the coordinator took, with its time.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        gate: GateState,
        ranks: Sequence[VirtualRank],
        *,
        seed: int,
        sync_ms: float,
        noise: float,
        batch_size: int,
        latency_ms: float = 0.1,
    ) -> None:
        self.coordinator = coordinator
        self.gate = gate
        self.ranks = ranks
        self.sync_ms = sync_ms
        self.noise = noise
        self.batch_size = batch_size
        self.rng = random.Random(seed)
        self.clock = Clock(self.rng, latency_ms)
        self.finish: Finish | None = None
        self.records: list[RoundEnded | EpochMetrics] = []
        self.facts: list[tuple[float, Fact]] = []
        self._tick_ms: float | None = None

    def run(self) -> None:
        """Run to the end.

        Raises:
            ProtocolError: A machine has found an error in the protocol, or nothing is left to happen.
        """
        self.begin()
        while self.finish is None:
            self.advance()

    def begin(self) -> None:
        """Let the ranks start."""
        for rank in range(len(self.ranks)):
            self.clock.after(self.rng.random() * self.clock.latency_ms, self.start, rank)

    def advance(self) -> None:
        """Let the next thing happen."""
        if not self.clock.advance():
            raise ProtocolError(f"nothing is left to happen: {[rank.state for rank in self.ranks]}")

    # ------------------------------------------------------------------ coordinator
    def tell(self, fact: Fact, *link: object) -> None:
        """Send a fact to the coordinator over a link."""
        self.clock.send(link, self.handle, fact)

    def handle(self, fact: Fact) -> None:
        """The coordinator takes a fact, and its commands are obeyed."""
        for command in self.decide(fact):
            self.obey(command)
        deadline_ms = self.coordinator.deadline_ms()
        if deadline_ms is not None and deadline_ms != self._tick_ms:
            self._tick_ms = deadline_ms
            self.clock.after(max(0.0, deadline_ms - self.clock.now_ms), self._tick, deadline_ms)

    def decide(self, fact: Fact) -> Sequence[Command]:
        """The coordinator takes a fact and decides."""
        self.facts.append((self.clock.now_ms, fact))
        return self.coordinator.handle(fact, self.clock.now_ms)

    def obey(self, command: Command) -> None:
        """Obey a command."""
        match command:
            case Send():
                self.send(command.rank, command.order)
            case Directives():
                self.gate.direct(command)
            case Average():
                self.clock.after(self.sync_ms, self._average, command.round)
            case RoundEnded() | EpochMetrics():
                self.records.append(command)
            case Finish():
                self.finish = command

    def send(self, number: int, order: Order) -> None:
        """Send an order to a rank."""
        self.clock.send(number, self.deliver, number, order)

    def _average(self, round: int) -> None:
        self.tell(Averaged(round, self.sync_ms, (0.001,) * len(self.ranks)), "average")

    def _tick(self, deadline_ms: float) -> None:
        if self.coordinator.deadline_ms() == deadline_ms:
            self._tick_ms = None
            self.handle(Tick())

    # ------------------------------------------------------------------ ranks
    def start(self, number: int) -> None:
        """A rank is ready."""
        self.ranks[number].state = "idle"
        self.tell(WorkerReady(number), "up", number)
        self.proceed(number)

    def deliver(self, number: int, order: Order) -> None:
        """An order comes into the inbox of a rank."""
        rank = self.ranks[number]
        rank.inbox.append(order)
        if rank.is_listening:
            self.proceed(number)

    def resume(self, number: int, state: str) -> None:
        """Let a rank proceed that is in this state."""
        if self.ranks[number].state == state:
            self.proceed(number)

    def proceed(self, number: int) -> None:
        """Between two steps: read the inbox, then do as the machine says."""
        rank = self.ranks[number]
        rank.take_orders()
        while True:
            match action := rank.machine.next():
                case Step():
                    self.begin_step(number, action)
                case Arrival():
                    self.enter(number, action)
                case Done():
                    self.report(number, action)
                    continue
                case Snapshot():
                    self.snapshot(number, action)
                case Apply():
                    self.apply(number, action.round)
                case Idle():
                    self.idle(number)
                case Leave():
                    self.leave(number)
                case _:
                    self.serve(number, action)
            return

    def begin_step(self, number: int, step: Step) -> None:
        """A rank begins a step."""
        self.ranks[number].state = "step"
        ms = self.step_ms(number, step)
        self.clock.after(ms, self.end_step, number, step, ms)

    def step_ms(self, number: int, step: Step) -> float:
        """Draw the time of a step."""
        ms = self.ranks[number].ms_per_step
        if step.part is not None:
            ms = ms * step.part.samples / self.batch_size
        return ms * (1 + self.noise * (2 * self.rng.random() - 1))

    def samples_of(self, step: Step) -> int:
        """Samples that a rank trains in a step."""
        return self.batch_size * len(step.batches) if step.part is None else step.part.samples

    def end_step(self, number: int, step: Step, ms: float) -> None:
        """A rank has taken a step."""
        self.ranks[number].stepped(self.samples_of(step), ms)
        self.proceed(number)

    def report(self, number: int, done: Done) -> None:
        """A rank reports its work since the last report."""
        work = self.ranks[number].work(done)
        self.tell(StepsDone(number, done.plan, work, done.is_last, done.mean), "up", number)

    def snapshot(self, number: int, action: Snapshot) -> None:
        """A rank takes its snapshot."""
        rank = self.ranks[number]
        rank.state = "busy"
        is_bad = rank.machine.is_bad
        self.send_snapshot(SnapshotReady(number, action.round, action.steps, action.samples, is_bad))
        self.clock.after(self.sync_ms / 4, self.resume, number, "busy")

    def send_snapshot(self, ready: SnapshotReady) -> None:
        """A snapshot lies ready."""
        self.tell(ready, "snapshot", ready.rank)

    def apply(self, number: int, _round: int) -> None:
        """A rank applies the mean of a round to its replica."""
        self.ranks[number].state = "busy"
        self.clock.after(self.sync_ms / 4, self.resume, number, "busy")

    def serve(self, number: int, task: BarrierTask) -> None:
        """A rank begins a barrier task."""
        raise ProtocolError(f"rank {number} got {task} in a run without barrier tasks")

    def idle(self, number: int) -> None:
        """A rank has nothing to do."""
        self.ranks[number].state = "idle"

    def leave(self, number: int) -> None:
        """The thread of a rank ends, as told."""
        self.ranks[number].state = "gone"
        self.tell(Exiting(number), "up", number)

    # ------------------------------------------------------------------ gate
    def enter(self, number: int, arrival: Arrival) -> None:
        """A rank enters the gate, and goes on when all have come and their mean is there."""
        rank = self.ranks[number]
        rank.state, rank.entered_ms = "gate", self.clock.now_ms
        outcome = self.gate.enter(rank.machine.judged(arrival))
        if outcome is not None:
            self.meet(outcome)

    def meet(self, outcome: Outcome) -> None:
        """All members stand in the gate, and their mean begins."""
        for member in outcome.members:
            rank = self.ranks[member]
            rank.averaged(wait_ms=self.clock.now_ms - rank.entered_ms)
        sync_ms = self.averaging_ms(outcome)
        self.clock.after(sync_ms, self.held, outcome, sync_ms)

    def averaging_ms(self, outcome: Outcome) -> float:
        """Time of the mean that begins now."""
        return self.sync_ms if len(outcome.members) > 1 else 0.0

    def held(self, outcome: Outcome, sync_ms: float) -> None:
        """A round was held, and its mean is in."""
        for member in outcome.members:
            rank = self.ranks[member]
            rank.state = "idle"
            rank.averaged(sync_ms=sync_ms)
            done = rank.machine.met(outcome)
            if done is not None:
                self.tell(self.acknowledgment(member, outcome, done, sync_ms), "up", member)
            self.clock.after(0.0, self.resume, member, "idle")

    def acknowledgment(self, number: int, outcome: Outcome, done: Done, sync_ms: float) -> SyncAck:
        """Acknowledge the last round of an order."""
        checksum = Checksum("simulated", 0) if outcome.compares else None
        return SyncAck(number, outcome, self.ranks[number].work(done), sync_ms, 0.001, checksum)
