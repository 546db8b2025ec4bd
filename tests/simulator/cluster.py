"""A virtual cluster with faults, judged by all rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.event_log import brief
from flowdp.machine.policies import ROUNDS
from flowdp.machine.worker import (
    Done,
    Snapshot,
    Step,
    WorkerMachine,
)
from flowdp.protocol.commands import (
    AbortGate,
    Average,
    Command,
    CutEvaluation,
    EpochMetrics,
    EpochStarted,
    EvaluationEnded,
    Fail,
    Finish,
    LeaveGate,
    Paused,
    RoundEnded,
    Save,
)
from flowdp.protocol.gate import GateState, PartState
from flowdp.protocol.messages import (
    Arrival,
    BarrierTask,
    CheckpointWritten,
    Checksum,
    DataEnded,
    Exiting,
    Fact,
    Failed,
    Order,
    Outcome,
    Requested,
    Settle,
    SnapshotReady,
    SyncAck,
    TaskDone,
)
from tests.simulator.effect import Memory
from tests.simulator.machines import MachinesWorld
from tests.simulator.rank import FaultyRank
from tests.simulator.reader import VirtualReader
from tests.simulator.rules import Rules
from tests.simulator.scenario import LATENCY_MS, STALL, Disturbance, Scenario
from tests.simulator.serving import Serving
from tests.simulator.violation import Violation

__all__ = ["JudgedWorld", "Machines"]


@dataclass(frozen=True)
class Machines:
    """Machines of a world; the mutants plant others."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    gate: type[GateState] = GateState
    part: type[PartState] = PartState


class JudgedWorld(MachinesWorld):
    """One run of a scenario, judged by all rules.

    Each method does the same as that of `MachinesWorld`, and lets the faults of the scenario happen on the
    way.

    Args:
        scenario: The run.
        machines: The machines to run.
        trace: Called with the time and a line for every event; None: silent.
        memory: State of the run that this one continues; None: it continues none.

    Attributes:
        rules: The judges.
        readers: Readers of data of unknown length, one of each machine; empty: of any other, which is always
            there.
        events: Number of things that have happened.
        disturbed_until: Records at the end of the disturbance; 0 without one.
    """

    ranks: Sequence[FaultyRank]

    def __init__(
        self,
        scenario: Scenario,
        machines: Machines | None = None,
        trace: Callable[[float, str], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        machines, config = machines or Machines(), scenario.config
        global_step = 0 if config.start is None else config.start.global_step
        super().__init__(
            machines.coordinator(config),
            machines.gate(config.world_size),
            [
                FaultyRank(machines.worker(rank, global_step), ms)
                for rank, ms in enumerate(scenario.ms_per_step)
            ],
            seed=scenario.seed,
            sync_ms=scenario.sync_ms,
            noise=scenario.noise,
            batch_size=scenario.batch_size,
            latency_ms=scenario.latency_ms,
            links=scenario.links,
            part=machines.part,
        )
        averages = ROUNDS[config.policy].averages
        for rank in self.ranks:
            # Of parameters on several machines the host knows at the gate.
            is_known = averages == "snapshots" or (averages == "parameters" and bool(self.parts))
            rank.is_late = scenario.late_verdicts and not is_known
            rank.heals = averages != "gradients"
        self.scenario = scenario
        self.rules = Rules(scenario, memory)
        self.readers: list[VirtualReader] = []
        if config.batches is None:
            self.readers = [
                VirtualReader(scenario, self.clock, self._wake, self._read_end, machine)
                for machine in range(scenario.streams)
            ]
        self.events = 0
        self.disturbed_until = 0
        self._serving = Serving(scenario, self.clock, self.rng, self.rules, self.crashes, self._served)
        self._to_write: int | None = None  # the newest checkpoint that is not written
        self._slow_until_ms: float | None = None  # of the disturbance, once it has begun
        self._trace = trace
        self._lost: set[int] = set()  # machines
        self._happened: Counter[str] = Counter()  # on the machine that will be lost

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: A rule does not hold.
        """
        try:
            super().run()
        except ProtocolError as error:
            raise Violation("S2", f"the protocol was broken: {error}") from error

    def begin(self) -> None:
        """Let the ranks, the reader and the user start."""
        super().begin()
        for reader in self.readers:
            reader.start()
        for wish in self.scenario.wishes:
            self.clock.after(wish.at_ms, self._wish, wish.request)
        loss = self.scenario.loss
        if loss is not None and loss.where == "time":
            self.clock.after(loss.after, self._lose)

    def advance(self) -> None:
        """Let the next thing happen."""
        if not self.clock.advance():
            self.rules.stands_still(f"{[rank.state for rank in self.ranks]}, {self.coordinator.phase}")
        self.events += 1
        self.rules.passes(self.clock.now_ms)

    def say(self, text: str, *about: object) -> None:
        """Tell the trace of an event."""
        if self._trace is not None:
            self._trace(self.clock.now_ms, text.format(*map(brief, about)))

    # ------------------------------------------------------------------ coordinator
    def _wish(self, request: Requested) -> None:
        self.rules.wishes(request, self.coordinator, self.clock.now_ms)
        self.handle(request)

    def decide(self, fact: Fact) -> Sequence[Command]:
        """The coordinator takes a fact and decides."""
        self.say("-> {}", fact)
        self.rules.looks_at_clock(self.coordinator, self.clock.now_ms)
        self.rules.hears(fact, self.coordinator)
        commands = super().decide(fact)
        self.rules.decides(fact, commands, self.coordinator, self.clock.now_ms)
        return commands

    def obey(self, command: Command) -> None:
        """Obey a command."""
        self.say("<- {}", command)
        super().obey(command)
        now_ms = self.clock.now_ms
        match command:
            case AbortGate():
                self._serving.cut()
                self._abort(command.reason)
            case LeaveGate():
                self.rules.loses(command.rank)
                self.leave_gate(command.rank)
            case CutEvaluation():
                self._serving.cut()
            case Save():
                self.rules.saved(command, now_ms)
                if command.version is not None:
                    self._write(command.version)
            case Average():
                self.rules.averages(command.round, command.samples)
            case RoundEnded():
                if self._slow_until_ms is not None and now_ms <= self._slow_until_ms:
                    self.disturbed_until = len(self.records)
                cadence = self.coordinator.rounds.cadence
                self.rules.reported(command, () if cadence is None else cadence.quotas, now_ms)
            case EvaluationEnded():
                self.rules.standing.evaluation_ended(command)
            case EpochStarted():
                self.rules.starts(command.epoch)
            case EpochMetrics():
                self.rules.ended(command)
            case Paused():
                self.rules.paused(command, any(rank.state == "step" for rank in self.ranks))
            case Fail():
                self.rules.fails(now_ms)
            case Finish():
                self.rules.over(command, self.coordinator)

    def send(self, number: int, order: Order) -> None:
        """Send an order to a rank."""
        stirs: list[str] = []
        if isinstance(order, BarrierTask):
            stirs = [f"rank {other} {rank.stirs}" for other, rank in enumerate(self.ranks) if rank.stirs]
        self.rules.ordered(number, order, is_gone=number in self.coordinator._gone, stirs=stirs)
        self.ranks[number].expect(order)
        super().send(number, order)

    def _write(self, version: int) -> None:
        """Write a checkpoint; of those that come meanwhile the newest is written next."""
        is_writing, self._to_write = self._to_write is not None, version
        if not is_writing:
            self.clock.after(self.scenario.write_ms, self._wrote, version)

    def _wrote(self, version: int) -> None:
        newest, self._to_write = self._to_write, None
        self.rules.standing.written(version, self.clock.now_ms)
        self.tell(CheckpointWritten(version), "writer")
        if newest is not None and newest != version:
            self._write(newest)

    # ------------------------------------------------------------------ data
    def reader_of(self, number: int) -> VirtualReader:
        """The reader that serves a rank."""
        return self.readers[self.machine_of[number]]

    def _read_end(self, end: DataEnded) -> None:
        if self.is_lost(end.machine):
            return
        self.rules.read_end(end, self.clock.now_ms)
        self.tell(end, "reader", end.machine)

    def _wake(self, number: int, key: tuple[int, int]) -> None:
        self.say("batch {} of epoch {} is there for rank {}", key[1], key[0], number)
        self.clock.send(("data", number), self.resume, number, "waiting")

    # ------------------------------------------------------------------ ranks
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

    # ------------------------------------------------------------------ a machine that is lost
    def _happens(self, where: str, number: int, later_ms: float = 0.0) -> None:
        """Something happens to a rank, in which its machine may be lost."""
        loss = self.scenario.loss
        if loss is None or loss.where != where or loss.machine != self.machine_of[number]:
            return
        if self._happened[where] == loss.after:
            self.clock.after(later_ms, self._lose)
        self._happened[where] += 1

    def _lose(self) -> None:
        """A machine is lost: nothing comes from it any more, and nothing comes to it."""
        loss = self.scenario.loss
        if loss is None or loss.machine in self._lost:
            return
        self._lost.add(loss.machine)
        ranks = self.ranks_of(loss.machine)
        self.say("machine {} is lost", loss.machine)
        missed = [rank for rank in ranks if self.ranks[rank].state != "gone"]
        for rank in missed:
            self.ranks[rank].state = "gone"
            self.rules.goes_on(rank)
            self.rules.idles(rank)
        self.clock.after(loss.detect_ms, self._detect, loss.machine, missed)

    def _detect(self, machine: int, missed: Sequence[int]) -> None:
        """The coordinator hears of it."""
        error = f"machine {machine} is lost"
        if missed and self.coordinator.phase is not Phase.DONE:
            self.rules.loses_machine(error, missed, self.clock.now_ms)
        if self.finish is None:
            self.handle(Failed(error, tuple(self.ranks_of(machine))))

    def is_lost(self, machine: int) -> bool:
        """Whether a machine is lost."""
        return machine in self._lost

    def travel(self, link: str, machine: int, act: Callable[..., None], *args: object) -> None:
        """Let a message cross the link of a machine, if it is there when it sets out."""
        if not self.is_lost(machine):
            super().travel(link, machine, act, *args)

    def start(self, number: int) -> None:
        """A rank is ready."""
        if self.ranks[number].state == "gone":
            return
        if not self.crashes(number, "start"):
            super().start(number)

    def deliver(self, number: int, order: Order) -> None:
        """An order comes into the inbox of a rank."""
        rank = self.ranks[number]
        if rank.state != "gone":
            rank.receive(order)
            self.rules.delivered(number, order)
            super().deliver(number, order)

    def proceed(self, number: int) -> None:
        """Between two steps: read the inbox, then do as the machine says."""
        rank = self.ranks[number]
        rank.wake(self.clock.now_ms)
        super().proceed(number)
        if rank.state != "waiting":
            self.rules.goes_on(number)

    def begin_step(self, number: int, step: Step) -> None:
        """A rank begins a step, or waits for its batches."""
        keys = [(step.epoch, batch) for batch in step.batches]
        missing = self.reader_of(number).take(number, *keys) if self.readers else None
        if missing is not None:
            rank = self.ranks[number]
            rank.state, rank.asked_ms = "waiting", self.clock.now_ms
            self.rules.waits(number, missing, self.clock.now_ms)
        elif not self.crashes(number, "step"):
            self.rules.step_begins(number, keys[0], step.position)
            self._happens("step", number, self.ranks[number].ms_per_step / 2)
            super().begin_step(number, step)

    def step_ms(self, number: int, step: Step) -> float:
        """Draw the time of a step."""
        scenario, steps = self.scenario, self.ranks[number].machine.total_steps
        ms = super().step_ms(number, step)
        if scenario.fixed and step.part is not None:
            ms *= scenario.fixed * scenario.batch_size / step.part.samples + 1.0 - scenario.fixed
        slow = scenario.slow_from
        if slow is not None and slow[0] == number and steps >= slow[1]:
            ms *= slow[2]
        if scenario.stall and self.rng.random() < scenario.stall:
            ms *= STALL
        if scenario.disturbance is not None and number == scenario.disturbance.rank:
            ms *= self._slowed(scenario.disturbance, steps, ms)
        return ms

    def _slowed(self, disturbance: Disturbance, steps: int, ms: float) -> float:
        """Slowdown of the step that the disturbed rank begins after so many others."""
        now_ms = self.clock.now_ms
        if self._slow_until_ms is None:
            if steps < disturbance.step:
                return 1.0
            self._slow_until_ms = now_ms + max(disturbance.for_ms, ms * disturbance.factor)
            return disturbance.factor
        return disturbance.factor if now_ms < self._slow_until_ms else 1.0

    def samples_of(self, step: Step) -> int:
        """Samples that a rank trains in a step."""
        return self.scenario.samples_of(step)

    def end_step(self, number: int, step: Step, ms: float) -> None:
        """A rank has taken a step."""
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        # Its optimizer spoils a replica again that an inner mean has made finite.
        is_again = rank.heals and bool(self.parts) and self.rules.standing.is_bad(number)
        if is_again or (number, rank.machine.total_steps) in self.scenario.bad_steps:
            self.rules.goes_bad(number, is_late=rank.hears_late(step))
            rank.goes_bad(step)
        self.rules.step_ends(number, step)
        batches = step.batches[0] if len(step.batches) == 1 else step.batches
        self.say("rank {} trained batch {} of epoch {}", number, batches, step.epoch)
        super().end_step(number, step, ms)

    def report(self, number: int, done: Done) -> None:
        """A rank reports its work since the last report."""
        self.rules.reports(number, done, self.ranks[number].sums.steps)
        super().report(number, done)

    def snapshot(self, number: int, action: Snapshot) -> None:
        """A rank takes its snapshot."""
        if not self.crashes(number, "snapshot"):
            self.rules.snapped(number, action.round, action.steps, action.samples)
            super().snapshot(number, action)

    def send_snapshot(self, ready: SnapshotReady) -> None:
        """A snapshot lies ready; it may come late."""
        is_late = self.rng.random() < self.scenario.late_snapshot
        late_ms = self.rng.random() * LATENCY_MS if is_late else 0.0
        self.clock.send(("snapshot", ready.rank), self.handle, ready, extra_ms=late_ms)

    def apply(self, number: int, round: int) -> None:
        """A rank applies the mean of a round to its replica."""
        if not self.crashes(number, "apply"):
            self.rules.applied(number, round)
            super().apply(number, round)

    def serve(self, number: int, task: BarrierTask) -> None:
        """A rank begins a barrier task."""
        self._happens("task", number)
        if isinstance(task, Settle):
            super().serve(number, task)
            if self.parts and self.parts[self.machine_of[number]].error is not None:
                self._release(number)  # the order to leave came behind this one
            return
        self.ranks[number].state = "serving"
        self._serving.serve(number, task)

    def idle(self, number: int) -> None:
        """A rank has nothing to do."""
        self.rules.idles(number)
        super().idle(number)

    def _served(self, number: int, fact: TaskDone) -> None:
        if self.ranks[number].state == "gone":
            return
        self.say("rank {} has done its barrier task: {}", number, fact)
        self.tell(fact, "up", number)
        self.ranks[number].state = "idle"
        self.proceed(number)

    def leave(self, number: int, error: str | None = None, *, is_alone: bool = False) -> None:
        """The thread of a rank ends, as told or by a failure."""
        if self.readers and is_alone:
            self.reader_of(number).reclaim(number)
        rank = self.ranks[number]
        rank.state = "gone"
        self.rules.left(number)
        self.say("rank {} leaves: {}", number, error or "as told")
        self.tell(Exiting(number, error, is_alone, rank.machine.unreported_samples), "up", number)

    # ------------------------------------------------------------------ gate
    def enter(self, number: int, arrival: Arrival) -> None:
        """A rank enters the gate, and goes on when all have come and their mean is there."""
        if self.crashes(number, "enter"):
            return
        rank = self.ranks[number]
        self.rules.enters(number)
        self._happens("gate", number)
        rank.read()
        self.say("rank {} enters the gate: {}", number, rank.machine.judged(arrival))
        try:
            super().enter(number, arrival)
        except CollectiveAborted:
            self._release(number)

    def bring(self, machine: int, came: Sequence[Arrival]) -> None:
        """All ranks of a machine stand in its gate, and their arrivals go to the gate of all."""
        super().bring(machine, came)
        self._happens("arrivals", came[0].rank)

    def gather(self, came: Sequence[Arrival]) -> None:
        """The arrivals of a machine are at the gate of all, which may have been aborted meanwhile."""
        if self.gate.error is None:
            super().gather(came)

    def conclude(self, machine: int, outcome: Outcome) -> None:
        """A machine has the outcome of a round of all."""
        self._happens("outcome", self.ranks_of(machine)[0])
        if not self.is_lost(machine) and self.gate.error is None:
            super().conclude(machine, outcome)

    def leave_gate(self, number: int) -> None:
        """A rank takes no part in the gate any more."""
        outcome = self.gate.leave(number)
        if outcome is not None:
            self.meet(outcome)

    def meet(self, outcome: Outcome) -> None:
        """All members stand in the gate, and their mean begins."""
        self.say("gate: {}", outcome)
        for member in outcome.members:
            if self.crashes(member, "mean"):
                # Its part of the mean is missing: the round is an error for all.
                reason = f"rank {member} failed in round {outcome.round}"
                if outcome.inner:
                    self._abort_part(self.machine_of[member], reason)
                else:
                    self._abort(reason)
                return
        super().meet(outcome)

    def held(self, outcome: Outcome, sync_ms: float) -> None:
        """A round was held, and its mean is in."""
        machines = {self.machine_of[member] for member in outcome.members}
        gates = [self.gate, *(self.parts[machine] for machine in machines if self.parts)]
        # One that is lost takes no more part in a mean of all, which then never ends.
        if any(gate.error is not None for gate in gates) or self._lost & machines:
            return
        for member in outcome.members:
            self.rules.met(member, outcome)
        for member in outcome.members:
            self.ranks[member].met()
            if self.readers:
                self.reader_of(member).settle(member)
        super().held(outcome, sync_ms)

    def acknowledgment(self, number: int, outcome: Outcome, done: Done, sync_ms: float) -> SyncAck:
        """Acknowledge the last round of an order."""
        rank, differs = self.ranks[number], self.scenario.differs
        self.rules.reports(number, done, rank.sums.steps)
        rank.read()
        ack = super().acknowledgment(number, outcome, done, sync_ms)
        if outcome.compares and differs is not None and differs[0] == number and done.epoch >= differs[1]:
            ack = replace(ack, checksum=Checksum("simulated", 1))
        return ack

    def _abort(self, reason: str) -> None:
        """Release all ranks from the gate, for good."""
        self.gate.abort(reason)
        if not self.parts:
            self._release_all(range(len(self.ranks)))
        for machine in range(len(self.parts)):
            self.travel("aborts", machine, self._abort_part, machine, reason)

    def _abort_part(self, machine: int, reason: str) -> None:
        """Release the ranks of a machine from its gate, for good."""
        self.parts[machine].abort(reason)
        self._release_all(self.ranks_of(machine))

    def _release_all(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.ranks[number].state in ("gate", "settling"):
                self.clock.after(0.0, self._release, number)

    def _release(self, number: int) -> None:
        """A rank leaves the aborted gate without an outcome, and waits for the order to leave."""
        rank = self.ranks[number]
        if rank.state == "gone":
            return
        rank.state = "released"
        rank.wake(self.clock.now_ms)
        rank.take_orders()
        if rank.machine.leaves:
            self.leave(number)
        else:
            # The order is on its way: look again when it has come.
            self.clock.after(self.scenario.way_ms + 0.01, self._release, number)
