"""A virtual cluster: the production machines on a heap of virtual time, in one thread.

Links are first in, first out, with a drawn latency; a meeting completes only when all members stand in the
gate, so a deadlock shows as nothing left to happen. Steps take drawn times. What is random comes from the
scenario's seed alone: the same scenario gives the same story.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.machine.commands import (
    AbortGate,
    Average,
    Command,
    Direct,
    EpochEnded,
    Fail,
    Finish,
    Hurry,
    Paused,
    RoundEnded,
    Send,
)
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.rounds import GateState
from flowdp.machine.story import brief
from flowdp.machine.worker import Apply, Enter, Idle, Leave, Report, Snapshot, Step, WorkerMachine
from flowdp.messages import (
    Averaged,
    DataEnded,
    Exiting,
    Fact,
    Order,
    Outcome,
    Requested,
    SnapshotReady,
    StepsDone,
    SyncAck,
    Tick,
    Updated,
    WorkerReady,
)
from flowdp.sim.clock import Clock
from flowdp.sim.faults import LATENCY_MS, STALL, Scenario
from flowdp.sim.rules import Rules, Violation
from flowdp.sim.shell import Shell
from flowdp.sim.source import VirtualReader

__all__ = ["Machines", "World"]

ABORTED = 2**62
"""The gate's hurry after an abort."""


@dataclass(frozen=True)
class Machines:
    """Which machines run; the mutants plant others."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    gate: type[GateState] = GateState


class World:
    """One run of a scenario.

    Args:
        scenario: What happens.
        machines: The machines to run.
        trace: Called with the time and a line for every event; None: silent.

    Attributes:
        clock: Virtual time.
        coordinator: The machine under test.
        rules: The judges; `rules.finish` is how the run ended.
        step_ms: Time that each rank spent in steps. Shape (world_size,).
        records: Every record the coordinator reported.
        facts: Every fact the coordinator took, with its time.
    """

    def __init__(
        self,
        scenario: Scenario,
        machines: Machines | None = None,
        trace: Callable[[float, str], None] | None = None,
    ) -> None:
        machines = machines or Machines()
        self.scenario = scenario
        self._rng = random.Random(scenario.seed)
        self.clock = Clock(self._rng, scenario.latency_ms)
        self.coordinator = machines.coordinator(scenario.config)
        self.gate = machines.gate(scenario.config.world_size)
        self.hurry = -1
        self.rules = Rules(scenario)
        self.ranks = [Shell(machines.worker(rank)) for rank in range(scenario.config.world_size)]
        self.step_ms = [0.0] * scenario.config.world_size
        self.records: list[RoundEnded | EpochEnded] = []
        self.facts: list[tuple[float, Fact]] = []
        self._source = None
        if scenario.config.batches is None:
            self._source = VirtualReader(scenario, self.clock, self._wake, self._ended)
        self._trace = trace
        self._tick_ms: float | None = None

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: A rule does not hold.
        """
        for rank in range(len(self.ranks)):
            self.clock.after(self._rng.random() * self.scenario.latency_ms, self._start, rank)
        if self._source is not None:
            self._source.start()
        for wish in self.scenario.wishes:
            self.clock.after(wish.at_ms, self._wish, wish.request)
        try:
            while self.rules.finish is None and self.clock.advance():
                self.rules.passes(self.clock.now_ms)
        except ProtocolError as error:
            raise Violation("S2", f"the protocol was broken: {error}") from error
        if self.rules.finish is None:
            self.rules.stands_still(f"{[rank.state for rank in self.ranks]}, {self.coordinator.life}")

    def _say(self, text: str, *about: object) -> None:
        if self._trace is not None:
            self._trace(self.clock.now_ms, text.format(*map(brief, about)))

    # ------------------------------------------------------------------ coordinator
    def _fact(self, fact: Fact, link: object, extra_ms: float = 0.0) -> None:
        self.clock.send(link, self._handle, fact, extra_ms=extra_ms)

    def _wish(self, request: Requested) -> None:
        self.rules.wishes(request)
        if request.what == "stop":
            self.rules.must_end("L3", self.clock.now_ms, rounds=4)
        self._handle(request)

    def _handle(self, fact: Fact) -> None:
        self._say("-> {}", fact)
        self.facts.append((self.clock.now_ms, fact))
        if isinstance(fact, DataEnded):
            self.rules.knows_end(fact)
        commands = self.coordinator.handle(fact, self.clock.now_ms)
        self.coordinator.check()
        for command in commands:
            self._obey(command)
        deadline_ms = self.coordinator.deadline_ms()
        if deadline_ms is not None and deadline_ms != self._tick_ms:
            self._tick_ms = deadline_ms
            self.clock.after(max(0.0, deadline_ms - self.clock.now_ms), self._tick, deadline_ms)

    def _tick(self, deadline_ms: float) -> None:
        if self.coordinator.deadline_ms() == deadline_ms:
            self._tick_ms = None
            self._handle(Tick())

    def _obey(self, command: Command) -> None:
        self._say("<- {}", command)
        match command:
            case Send():
                is_gone = command.rank in self.coordinator._gone
                self.rules.ordered(command.rank, command.order, is_gone=is_gone)
                self.clock.send(command.rank, self._deliver, command.rank, command.order)
            case Direct():
                self.gate.direct(command.directives)
            case Hurry():
                self.hurry = max(self.hurry, command.round)
                for number in range(len(self.ranks)):
                    self.clock.send(number, self._resume, number, "waiting")
            case AbortGate():
                self._abort(command.reason)
            case Average():
                self.rules.averages(command.round, command.samples)
                self.clock.after(self.scenario.sync_ms, self._averaged, command.round)
            case RoundEnded():
                self.records.append(command)
                cadence = self.coordinator.rounds.cadence
                self.rules.reported(command, () if cadence is None else cadence.quotas)
            case EpochEnded():
                self.records.append(command)
                self.rules.ended(command)
            case Paused():
                self.rules.paused(command, any(rank.state == "step" for rank in self.ranks))
            case Fail():
                self.rules.must_end("L2", self.clock.now_ms, rounds=2)
            case Finish():
                self.rules.over(command, self.coordinator)

    def _averaged(self, round: int) -> None:
        self._fact(Averaged(round, self.scenario.sync_ms, (0.001,) * len(self.ranks)), "average")

    def _abort(self, reason: str) -> None:
        self.gate.abort(reason)
        self.hurry = ABORTED
        for number, rank in enumerate(self.ranks):
            if rank.state == "gate":
                self.clock.after(0.0, self._released, number)

    # ------------------------------------------------------------------ workers
    def _start(self, number: int) -> None:
        if self._crashes(number, "start"):
            return
        self.ranks[number].state = "idle"
        self._fact(WorkerReady(number), ("up", number))
        self._boundary(number)

    def _deliver(self, number: int, order: Order) -> None:
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        rank.inbox.append(order)
        if rank.state in ("idle", "waiting"):
            self._boundary(number)

    def _ended(self, end: DataEnded) -> None:
        self.rules.read_end(end, self.clock.now_ms)
        self._fact(end, "reader")

    def _wake(self, number: int, key: tuple[int, int]) -> None:
        self._say("batch {} of epoch {} is there for rank {}", key[1], key[0], number)
        self.clock.send(("data", number), self._resume, number, "waiting")

    def _boundary(self, number: int) -> None:
        """Between two steps: read the inbox, then do what the machine says."""
        rank = self.ranks[number]
        rank.wake(self.clock.now_ms)
        while True:
            action = rank.machine.next(self.hurry)
            if not isinstance(action, Step):
                self.rules.goes_on(number)
            match action:
                case Step():
                    self._begin_step(number, action)
                case Enter():
                    self._enter(number, action)
                case Report():
                    work = self.ranks[number].work(action.done)
                    self._fact(StepsDone(number, action.done.plan, work), ("up", number))
                    continue
                case Snapshot():
                    self._snapshot(number, action)
                case Apply():
                    self._apply(number, action)
                case Idle():
                    rank.state = "idle"
                    self.rules.is_moving[number] = False
                case Leave():
                    self._leave(number, None)
            return

    def _begin_step(self, number: int, step: Step) -> None:
        rank, s = self.ranks[number], self.scenario
        keys = [(step.epoch, batch) for batch in step.batches]
        missing = None if self._source is None else self._source.take(number, *keys)
        if missing is not None:
            rank.state, rank.asked_ms = "waiting", self.clock.now_ms
            self.rules.is_moving[number] = False
            self.rules.waits(number, missing, self.clock.now_ms)
            return
        self.rules.goes_on(number)
        if self._crashes(number, "step"):
            return
        rank.state = "step"
        self.rules.is_moving[number] = True
        self.rules.step_begins(number, keys[0], step.position)
        mean_ms = s.step_ms(number, 0 if step.part is None else step.part.samples)
        ms = mean_ms * (1 + s.noise * (2 * self._rng.random() - 1))
        slow = s.slow_from
        if slow is not None and slow[0] == number and rank.machine.total_steps >= slow[1]:
            ms *= slow[2]
        if s.stall and self._rng.random() < s.stall:
            ms *= STALL
        self.clock.after(ms, self._end_step, number, step, ms)

    def _end_step(self, number: int, step: Step, ms: float) -> None:
        rank = self.ranks[number]
        rank.stepped(self.rules.step_ends(number, step), ms)
        self.step_ms[number] += ms
        what = step.batches[0] if len(step.batches) == 1 else step.batches
        self._say("rank {} trained batch {} of epoch {}", number, what, step.epoch)
        self._boundary(number)

    def _enter(self, number: int, action: Enter) -> None:
        rank = self.ranks[number]
        if self._crashes(number, "enter"):
            return
        rank.state = "gate"
        rank.entered_ms = self.clock.now_ms
        self.rules.is_moving[number] = False
        self._say("rank {} enters the gate: {}", number, action.arrival)
        try:
            outcome = self.gate.enter(action.arrival)
        except CollectiveAborted:
            self._released(number)
            return
        if outcome is not None:
            self._hold(outcome)

    def _hold(self, outcome: Outcome) -> None:
        self._say("gate: {}", outcome)
        for member in outcome.members:
            self.ranks[member].wait_ms += self.clock.now_ms - self.ranks[member].entered_ms
        for member in outcome.members:
            if self._crashes(member, "mean"):
                # Its part of the mean is missing: the round is an error for all.
                self._abort(f"rank {member} failed in round {outcome.round}")
                return
        sync_ms = self.scenario.sync_ms if len(outcome.members) > 1 else 0.0
        self.clock.after(sync_ms, self._held, outcome)

    def _held(self, outcome: Outcome) -> None:
        if self.gate.error is not None:
            return
        for member in outcome.members:
            self.rules.met(member, outcome)
        for member in outcome.members:
            rank = self.ranks[member]
            rank.state = "idle"
            done = rank.machine.met(outcome)
            if done is not None:
                sync_ms = self.scenario.sync_ms if len(outcome.members) > 1 else 0.0
                bits = self._bits(member, done.epoch) if outcome.compare else None
                ack = SyncAck(member, outcome, rank.work(done), sync_ms, rank.wait_ms, 0.001, bits)
                rank.wait_ms = 0.0
                self._fact(ack, ("up", member))
            self.clock.after(0.0, self._resume, member, "idle")

    def _bits(self, number: int, epoch: int) -> int:
        differs = self.scenario.differs
        return int(differs is not None and differs[0] == number and epoch >= differs[1])

    def _resume(self, number: int, state: str) -> None:
        if self.ranks[number].state == state:
            self._boundary(number)

    def _released(self, number: int) -> None:
        """The gate was aborted: wait for the order to leave."""
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        rank.state = "released"
        rank.wake(self.clock.now_ms)
        if isinstance(rank.machine.next(-1), Leave):
            self._leave(number, None)
        else:
            # The order is on its way: look again when it has come.
            self.clock.after(self.scenario.latency_ms + 0.01, self._released, number)

    def _snapshot(self, number: int, action: Snapshot) -> None:
        rank, s = self.ranks[number], self.scenario
        if self._crashes(number, "snapshot"):
            return
        rank.state = "busy"
        self.rules.snapped(number, action.round, action.steps, action.samples)
        if self._rng.random() >= s.lost_snapshot:
            late_ms = self._rng.random() * LATENCY_MS if self._rng.random() < s.late_snapshot else 0.0
            fact = SnapshotReady(number, action.round, action.steps, action.samples)
            self._fact(fact, ("snapshot", number), extra_ms=late_ms)
        self.clock.after(s.sync_ms / 4, self._resume, number, "busy")

    def _apply(self, number: int, action: Apply) -> None:
        rank = self.ranks[number]
        if self._crashes(number, "apply"):
            return
        rank.state = "busy"
        self.rules.applied(number, action.round)
        self._fact(Updated(number, action.round), ("up", number))
        self.clock.after(self.scenario.sync_ms / 4, self._resume, number, "busy")

    def _leave(self, number: int, error: str | None) -> None:
        self.ranks[number].state = "gone"
        self.rules.left(number)
        self._say("rank {} leaves: {}", number, error or "as told")
        self._fact(Exiting(number, error), ("up", number))

    def _crashes(self, number: int, where: str) -> bool:
        rank = self.ranks[number]
        acts = rank.acts[where]
        rank.acts[where] += 1
        for crash in self.scenario.crashes:
            if crash.rank == number and crash.where == where and crash.after == acts:
                self.rules.must_end("L2", self.clock.now_ms, rounds=2)
                self._leave(number, f"rank {number} failed at {where} {acts}")
                return True
        return False
