"""A virtual cluster: the production machines on a heap of virtual time, in one thread.

Links are first in, first out, with a drawn latency; a meeting completes only when all members stand in the
gate, so a deadlock shows as nothing left to happen. Steps take drawn times. All that is random comes from the
scenario's seed alone: the same scenario gives the same event log.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowdp.errors import ProtocolError
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.event_log import brief
from flowdp.machine.gate import GateState
from flowdp.machine.policies import ROUNDS
from flowdp.machine.worker import (
    Apply,
    Done,
    Enter,
    Idle,
    Leave,
    Report,
    Serve,
    Snapshot,
    Step,
    WorkerMachine,
)
from flowdp.policy.tally import Work
from flowdp.protocol.commands import (
    AbortGate,
    Average,
    Command,
    CutEvaluation,
    Direct,
    EpochEnded,
    Fail,
    Finish,
    LeaveGate,
    Paused,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.messages import (
    Averaged,
    BarrierTask,
    DataEnded,
    Evaluated,
    Exiting,
    Fact,
    Order,
    Outcome,
    ReplicaCopied,
    Requested,
    SnapshotReady,
    StateSaved,
    StepsDone,
    SyncAck,
    Tick,
    Updated,
    WorkerReady,
)
from flowdp.sim.clock import Clock
from flowdp.sim.gate import VirtualGate
from flowdp.sim.scenario import LATENCY_MS, STALL, Disturbance, Scenario
from flowdp.sim.serving import Serving
from flowdp.sim.shell import Shell
from flowdp.sim.source import VirtualReader
from flowdp.sim.watcher import Watcher

__all__ = ["Machines", "World"]


@dataclass(frozen=True)
class Machines:
    """Machines of a world; the mutants plant others."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    gate: type[GateState] = GateState


class World:
    """One run of a scenario.

    Args:
        scenario: The ranks, their data, and what goes wrong.
        machines: The machines to run.
        trace: Called with the time and a line for every event; None: silent.
        watcher: Hears of all events; None: nothing does.

    Attributes:
        clock: Virtual time.
        coordinator: The machine under test.
        finish: How the run ended; None while it runs.
        source: Of data of unknown length; None: of any other, which is always there.
        step_ms: Time that each rank spent in steps. Shape (world_size,).
        records: Every record the coordinator reported.
        facts: Every fact the coordinator took, with its time.
        disturbed_until: Records at the end of the disturbance; 0 without one.
    """

    def __init__(
        self,
        scenario: Scenario,
        machines: Machines | None = None,
        trace: Callable[[float, str], None] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        machines = machines or Machines()
        self.scenario = scenario
        self._rng = random.Random(scenario.seed)
        self.clock = Clock(self._rng, scenario.latency_ms)
        world_size, start = scenario.config.world_size, scenario.config.start
        self.coordinator = machines.coordinator(scenario.config)
        self.watcher = watcher or Watcher()
        self.finish: Finish | None = None
        global_step = 0 if start is None else start.global_step
        self.ranks: Sequence[Shell] = [
            Shell(machines.worker(rank, global_step)) for rank in range(world_size)
        ]
        self.step_ms = [0.0] * world_size
        if ROUNDS[scenario.config.policy].averages == "parameters":
            for shell in self.ranks:
                shell.machine.is_late = scenario.late_verdicts
        self.gate = VirtualGate(self, machines.gate(world_size), scenario.sync_ms)
        self._serving = Serving(scenario, self.clock, self._rng, self.watcher, self.crashes, self._served)
        self.records: list[RoundEnded | EpochEnded] = []
        self.facts: list[tuple[float, Fact]] = []
        self.source: VirtualReader | None = None
        if scenario.config.batches is None:
            self.source = VirtualReader(scenario, self.clock, self._wake, self._ended)
        self.disturbed_until = 0
        self._slow_until_ms: float | None = None  # of the disturbance, once it has begun
        self._trace = trace
        self._tick_ms: float | None = None

    def run(self) -> None:
        """Run to the end.

        Raises:
            ProtocolError: A machine has found an error in the protocol, or nothing is left to happen.
        """
        for rank in range(len(self.ranks)):
            self.clock.after(self._rng.random() * self.scenario.latency_ms, self._start, rank)
        if self.source is not None:
            self.source.start()
        for wish in self.scenario.wishes:
            self.clock.after(wish.at_ms, self._wish, wish.request)
        while self.finish is None and self.clock.advance():
            self.watcher.passes(self.clock.now_ms)
        if self.finish is None:
            states = f"{[rank.state for rank in self.ranks]}, {self.coordinator.life}"
            self.watcher.stands_still(states)
            raise ProtocolError(f"nothing is left to happen: {states}")

    def say(self, text: str, *about: object) -> None:
        """Tell the trace of an event."""
        if self._trace is not None:
            self._trace(self.clock.now_ms, text.format(*map(brief, about)))

    # ------------------------------------------------------------------ coordinator
    def fact(self, fact: Fact, link: object, extra_ms: float = 0.0) -> None:
        """Send a fact to the coordinator."""
        self.clock.send(link, self._handle, fact, extra_ms=extra_ms)

    def _wish(self, request: Requested) -> None:
        self.watcher.wishes(request, self.coordinator, self.clock.now_ms)
        self._handle(request)

    def _handle(self, fact: Fact) -> None:
        self.say("-> {}", fact)
        self.facts.append((self.clock.now_ms, fact))
        self.watcher.hears(fact, self.coordinator)
        commands = self.coordinator.handle(fact, self.clock.now_ms)
        self.watcher.decides(fact, commands, self.coordinator, self.clock.now_ms)
        for command in commands:
            self._obey(command)
        deadline_ms = self.coordinator.deadline_ms()
        if deadline_ms is not None and deadline_ms != self._tick_ms:
            self._tick_ms = deadline_ms
            self.clock.after(max(0.0, deadline_ms - self.clock.now_ms), self._tick, deadline_ms)

    def _lose(self, number: int) -> None:
        """The run goes on without a rank."""
        self.watcher.loses(number)
        self.gate.leave(number)

    def _tick(self, deadline_ms: float) -> None:
        if self.coordinator.deadline_ms() == deadline_ms:
            self._tick_ms = None
            self._handle(Tick())

    def _obey(self, command: Command) -> None:
        self.say("<- {}", command)
        match command:
            case Send():
                self._send(command.rank, command.order)
            case Direct():
                self.gate.direct(command.directives)
            case AbortGate():
                self._serving.cut()
                self.gate.abort(command.reason)
            case LeaveGate():
                self._lose(command.rank)
            case CutEvaluation():
                self._serving.cut()
            case Save():
                self.watcher.saved(command, self.clock.now_ms)
            case Average():
                self.watcher.averages(command.round, command.samples)
                self.clock.after(self.scenario.sync_ms, self._averaged, command.round)
            case RoundEnded():
                self.records.append(command)
                if self._slow_until_ms is not None and self.clock.now_ms <= self._slow_until_ms:
                    self.disturbed_until = len(self.records)
                cadence = self.coordinator.rounds.cadence
                quotas = () if cadence is None else cadence.quotas
                self.watcher.reported(command, quotas, self.clock.now_ms)
            case EpochEnded():
                self.records.append(command)
                self.watcher.ended(command)
            case Paused():
                self.watcher.paused(command, any(rank.state == "step" for rank in self.ranks))
            case Fail():
                self.watcher.fails(self.clock.now_ms)
            case Finish():
                self.finish = command
                self.watcher.over(command, self.coordinator)

    def _averaged(self, round: int) -> None:
        self.fact(Averaged(round, self.scenario.sync_ms, (0.001,) * len(self.ranks)), "average")

    def _send(self, number: int, order: Order) -> None:
        stirs: list[str] = []
        if isinstance(order, BarrierTask):
            stirs = [f"rank {other} {rank.stirs}" for other, rank in enumerate(self.ranks) if rank.stirs]
        self.watcher.ordered(number, order, is_gone=number in self.coordinator._gone, stirs=stirs)
        self.ranks[number].expect(order)
        self.clock.send(number, self._deliver, number, order)

    # ------------------------------------------------------------------ workers
    def _start(self, number: int) -> None:
        if self.crashes(number, "start"):
            return
        self.ranks[number].state = "idle"
        self.fact(WorkerReady(number), ("up", number))
        self._boundary(number)

    def _deliver(self, number: int, order: Order) -> None:
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        rank.receive(order)
        self.watcher.delivered(number, order)
        if rank.state in ("idle", "waiting"):
            self._boundary(number)

    def _ended(self, end: DataEnded) -> None:
        self.watcher.read_end(end, self.clock.now_ms)
        self.fact(end, "reader")

    def _wake(self, number: int, key: tuple[int, int]) -> None:
        self.say("batch {} of epoch {} is there for rank {}", key[1], key[0], number)
        self.clock.send(("data", number), self.resume, number, "waiting")

    def _boundary(self, number: int) -> None:
        """Between two steps: read the inbox, then do what the machine says."""
        rank = self.ranks[number]
        rank.wake(self.clock.now_ms)
        while True:
            action = rank.machine.next()
            if not isinstance(action, Step):
                self.watcher.goes_on(number)
            match action:
                case Step():
                    self._begin_step(number, action)
                case Enter():
                    self._enter(number, action)
                case Report():
                    work = self._work(number, action.done)
                    self.fact(StepsDone(number, action.done.plan, work, action.done.is_last), ("up", number))
                    continue
                case Snapshot():
                    self._snapshot(number, action)
                case Apply():
                    self._apply(number, action)
                case Serve():
                    rank.state = "serving"
                    self._serving.serve(number, action.task)
                case Idle():
                    rank.state = "idle"
                    self.watcher.idles(number)
                case Leave():
                    self.leave(number, None)
            return

    def _begin_step(self, number: int, step: Step) -> None:
        rank, s = self.ranks[number], self.scenario
        keys = [(step.epoch, batch) for batch in step.batches]
        missing = None if self.source is None else self.source.take(number, *keys)
        if missing is not None:
            rank.state, rank.asked_ms = "waiting", self.clock.now_ms
            self.watcher.waits(number, missing, self.clock.now_ms)
            return
        self.watcher.goes_on(number)
        if self.crashes(number, "step"):
            return
        rank.state = "step"
        self.watcher.step_begins(number, keys[0], step.position)
        mean_ms = s.step_ms(number, 0 if step.part is None else step.part.samples)
        ms = mean_ms * (1 + s.noise * (2 * self._rng.random() - 1))
        slow = s.slow_from
        if slow is not None and slow[0] == number and rank.machine.total_steps >= slow[1]:
            ms *= slow[2]
        if s.stall and self._rng.random() < s.stall:
            ms *= STALL
        if s.disturbance is not None and number == s.disturbance.rank:
            ms *= self._slowed(s.disturbance, rank.machine.total_steps, ms)
        self.clock.after(ms, self._end_step, number, step, ms)

    def _slowed(self, disturbance: Disturbance, steps: int, ms: float) -> float:
        """Slowdown of the step that the disturbed rank begins after so many others."""
        now_ms = self.clock.now_ms
        if self._slow_until_ms is None:
            if steps < disturbance.step:
                return 1.0
            self._slow_until_ms = now_ms + max(disturbance.for_ms, ms * disturbance.factor)
            return disturbance.factor
        return disturbance.factor if now_ms < self._slow_until_ms else 1.0

    def _end_step(self, number: int, step: Step, ms: float) -> None:
        rank = self.ranks[number]
        if (number, rank.machine.total_steps) in self.scenario.bad_steps:
            self.watcher.goes_bad(number, is_late=rank.machine.is_late)
            rank.goes_bad(step)
        self.watcher.step_ends(number, step)
        rank.stepped(self.scenario.samples_of(step), ms)
        self.step_ms[number] += ms
        what = step.batches[0] if len(step.batches) == 1 else step.batches
        self.say("rank {} trained batch {} of epoch {}", number, what, step.epoch)
        self._boundary(number)

    def _enter(self, number: int, action: Enter) -> None:
        if self.crashes(number, "enter"):
            return
        self.watcher.enters(number)
        rank = self.ranks[number]
        rank.read()
        self.gate.enter(rank.machine.judged(action.arrival))

    def held(self, outcome: Outcome, sync_ms: float) -> None:
        """A round was held, and its mean is in."""
        for member in outcome.members:
            self.watcher.met(member, outcome)
        for member in outcome.members:
            rank = self.ranks[member]
            rank.state = "idle"
            done = rank.machine.met(outcome)
            rank.met()
            if self.source is not None:
                self.source.settle(member)
            if done is not None:
                bits = self._bits(member, done.epoch) if outcome.compare else None
                is_bad = rank.unread is not None
                rank.read()
                work = self._work(member, done)
                ack = SyncAck(
                    member, outcome, work, sync_ms, rank.wait_ms, 0.001, bits, norm=None, bad=is_bad
                )
                rank.wait_ms = 0.0
                self.fact(ack, ("up", member))
            self.clock.after(0.0, self.resume, member, "idle")

    def released(self, number: int) -> None:
        """A rank has left the aborted gate without an outcome: it waits for the order to leave."""
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        rank.state = "released"
        rank.wake(self.clock.now_ms)
        if rank.machine.leaves:
            self.leave(number, None)
        else:
            # The order is on its way: look again when it has come.
            self.clock.after(self.scenario.latency_ms + 0.01, self.released, number)

    def _work(self, number: int, done: Done) -> Work:
        rank = self.ranks[number]
        self.watcher.reports(number, done, rank.steps)
        return rank.work(done)

    def _bits(self, number: int, epoch: int) -> int:
        differs = self.scenario.differs
        return int(differs is not None and differs[0] == number and epoch >= differs[1])

    def _served(self, number: int, fact: Evaluated | StateSaved | ReplicaCopied) -> None:
        self.say("rank {} has done its barrier task: {}", number, fact)
        self.fact(fact, ("up", number))
        self.ranks[number].state = "idle"
        self._boundary(number)

    def resume(self, number: int, state: str) -> None:
        """Let a rank go on that is in this state."""
        if self.ranks[number].state == state:
            self._boundary(number)

    def _snapshot(self, number: int, action: Snapshot) -> None:
        rank, s = self.ranks[number], self.scenario
        if self.crashes(number, "snapshot"):
            return
        rank.state = "busy"
        self.watcher.snapped(number, action.round, action.steps, action.samples)
        if self._rng.random() >= s.lost_snapshot:
            late_ms = self._rng.random() * LATENCY_MS if self._rng.random() < s.late_snapshot else 0.0
            fact = SnapshotReady(number, action.round, action.steps, action.samples, rank.machine.is_bad)
            self.fact(fact, ("snapshot", number), extra_ms=late_ms)
        self.clock.after(s.sync_ms / 4, self.resume, number, "busy")

    def _apply(self, number: int, action: Apply) -> None:
        rank = self.ranks[number]
        if self.crashes(number, "apply"):
            return
        rank.state = "busy"
        self.watcher.applied(number, action.round)
        self.fact(Updated(number, action.round), ("up", number))
        self.clock.after(self.scenario.sync_ms / 4, self.resume, number, "busy")

    def leave(self, number: int, error: str | None, *, is_alone: bool = False) -> None:
        """A rank's thread ends."""
        if self.source is not None and is_alone:
            self.source.reclaim(number)
        self.ranks[number].state = "gone"
        self.watcher.left(number)
        self.say("rank {} leaves: {}", number, error or "as told")
        self.fact(
            Exiting(number, error, is_alone, self.ranks[number].machine.unreported_samples), ("up", number)
        )

    def crashes(self, number: int, where: str) -> bool:
        """Whether a rank fails now that it comes to such an act."""
        rank = self.ranks[number]
        acts = rank.acts[where]
        rank.acts[where] += 1
        for crash in self.scenario.crashes:
            if crash.rank == number and crash.where == where and crash.after == acts:
                self.leave(number, f"rank {number} failed at {where} {acts}", is_alone=crash.is_alone)
                return True
        return False
