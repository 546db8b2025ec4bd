"""What must hold in every run, whatever happens: the simulator's judges.

The table of the rules is in docs/testing.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.policies import ROUNDS
from flowdp.machine.worker import Done, Step
from flowdp.protocol.commands import Command, EpochMetrics, Finish, LeaveGate, Paused, RoundEnded, Save
from flowdp.protocol.messages import (
    BarrierTask,
    DataEnded,
    Evaluation,
    Exiting,
    Fact,
    Order,
    Outcome,
    Requested,
    StartEpoch,
    SyncAck,
    TaskDone,
    Update,
)
from tests.invariants import check
from tests.simulator.bounds import Bounds
from tests.simulator.effect import Effect, Memory
from tests.simulator.leads import Leads
from tests.simulator.levels import Levels
from tests.simulator.scenario import Scenario
from tests.simulator.standing import Standing
from tests.simulator.violation import Violation
from tests.simulator.windows import Windows

__all__ = ["Rules", "Violation"]

RATES = ("set_lr", "scale_lr")

AT_ONCE = 10_000
"""Things that may happen without a moment between them."""


@dataclass(slots=True)
class _Snapshot:
    """What a rank's last snapshot holds."""

    round: int
    steps: int
    samples: int


class Rules:
    """Judges one run.

    Args:
        scenario: The run.
        memory: What had come of the one that it continues; None: it continues none.

    Attributes:
        effect: What was trained.
        standing: Watches the standstills.
        steps: Steps of each rank. Shape (world_size,).
        credited: Those of them that a mean holds. Shape (world_size,).
        outcomes: What each rank was told at the gate. Shape (world_size, rounds).
        is_moving: Whether a rank is in a step. Shape (world_size,).
        finish: How the run ended; None while it runs.
    """

    def __init__(self, scenario: Scenario, memory: Memory | None = None) -> None:
        config, world_size = scenario.config, scenario.config.world_size
        memory = memory or Memory()
        self.scenario = scenario
        self.bounds = Bounds(scenario)
        self.effect = Effect(scenario, memory)
        self.standing = Standing(scenario, self.effect, memory)
        self.epochs: list[int] = []
        self.global_step = memory.global_step
        self.steps = self.effect.steps
        self.credited = self.effect.credited
        self.outcomes: list[list[Outcome]] = [[] for _ in range(world_size)]
        self.is_moving = [False] * world_size
        self.is_paused = False
        self.finish: Finish | None = None
        self._has_begun = False
        self._stop_ms = math.inf  # by the clock
        self._may_go_on = False  # after the failure that the coordinator hears of
        self._again = None if memory.owed_epoch is None else memory.owed_epoch.epoch  # with its evaluation
        self._first_epoch = memory.epochs if self._again is None else self._again
        begun = config.start.open if config.start is not None else ()
        self._started = 0 if config.start is None else config.start.done  # epochs whose start was told
        self._complete = 0  # epochs reported as complete, up to the first that is not
        self._rounds = Counter({one.epoch: one.rounds for one in begun})  # epoch -> averagings told
        self._here = set(range(world_size))
        self._lost: set[int] = set()  # ranks without which the run goes on
        self._reasons: list[str] = []  # why the run may end before its last step
        self._end_by: list[tuple[float, str]] = []  # when all must have left, and by which rule
        self._snapshots = [_Snapshot(-1, 0, 0)] * world_size
        self._base = [memory.global_step] * world_size  # of the last mean
        self._mean_steps: dict[int, int] = {}  # round of snapshots -> global step of its mean
        self._wished: Counter[str] = Counter()
        self._obeyed: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # wish -> rounds since
        self._now_ms = 0.0
        self._at_once = 0
        self._ends: dict[int, list[DataEnded]] = {}  # by epoch, as the coordinator knows
        self._ends_ms: dict[tuple[int, int], float] = {}  # (epoch, machine) -> when the reader knew
        # rank -> the batch it waits for, since when
        self._waits: dict[int, tuple[tuple[int, int], float]] = {}
        is_shared = config.policy == "exact" and world_size > 1  # one rank has its windows to itself
        self._windows = Windows(scenario) if is_shared else None
        self._lead = config.cadence.max_batch_diff if config.policy == "cadence" else None
        self._leads = Leads(scenario) if config.policy == "async" else None
        self._levels = Levels(scenario)
        self._lost_machine = ""  # the error that tells of it

    def wishes(self, request: Requested, coordinator: Coordinator, now_ms: float) -> None:
        """The user asks for something."""
        self._wished[request.what] += 1
        if request.what == "unpause":
            self._waiting.pop("pause", None)
        elif request.what in ("pause", *RATES):
            self._waiting[request.what] = 0
        elif request.what == "stop":
            self.standing.is_stopped = True
            self._reasons.append("stop")
        is_open = coordinator.phase in (Phase.STARTING, Phase.RUNNING)
        if request.what in ("checkpoint", "snapshot") and is_open:
            self.standing.wishes(request.what)
        if request.what == "stop":
            # An order of one rank alone is one round, and is trained to its end.
            armed = getattr(coordinator.rounds, "_armed", ())
            windows = sum(len(one.dealt.hands[0]) for one in armed if one.dealt.alone is not None)
            self.must_end("L3", now_ms + windows * self.bounds.longest_step_ms, rounds=4)

    def looks_at_clock(self, coordinator: Coordinator, now_ms: float) -> None:
        """The coordinator is about to decide: the time of the run may be up, which is a wish to stop."""
        if self._stop_ms <= now_ms and coordinator.phase is Phase.RUNNING:
            self._stop_ms = math.inf
            self.wishes(Requested("stop"), coordinator, now_ms)

    # ------------------------------------------------------------------ facts
    def hears(self, fact: Fact, coordinator: Coordinator) -> None:
        """The coordinator is about to take a fact."""
        if isinstance(fact, DataEnded):
            self.knows_end(fact)
        if isinstance(fact, TaskDone):
            self.standing.answered(fact)
        if isinstance(fact, SyncAck) and fact.work.bad is not None and fact.rank not in fact.outcome.bad:
            self.standing.acknowledged(fact.rank)
        if isinstance(fact, Exiting):
            self._may_go_on = self._can_do_without(fact, coordinator)

    def decides(
        self, fact: Fact, commands: Sequence[Command], coordinator: Coordinator, now_ms: float
    ) -> None:
        """The coordinator has answered a fact."""
        check(coordinator)
        if self._leads is not None and isinstance(coordinator.rounds, AsyncRounds):
            self._leads.decides(commands, coordinator.rounds)
        if isinstance(fact, Exiting) and fact.error is not None:
            goes_on = any(isinstance(command, LeaveGate) for command in commands)
            self.exits(fact, now_ms, may=self._may_go_on, goes_on=goes_on)
        if not self._has_begun and coordinator.phase is Phase.RUNNING:
            self._has_begun = True
            self._stop_ms = now_ms + (self.scenario.config.max_ms or math.inf)
            self.standing.begins(now_ms)

    def _can_do_without(self, fact: Exiting, coordinator: Coordinator) -> bool:
        """Whether the run can do without a rank that has failed, and shall."""
        config = self.scenario.config
        is_wanted = config.on_failure == "continue" and ROUNDS[config.policy].averages == "parameters"
        is_running = coordinator.phase is Phase.RUNNING and coordinator.error is None
        others = [rank for rank in range(config.world_size) if rank not in (*coordinator._gone, fact.rank)]
        return is_wanted and is_running and fact.is_alone and bool(others)

    # ------------------------------------------------------------------ time
    def must_end(self, rule: str, now_ms: float, rounds: int) -> None:
        """Something happened after which every rank shall leave within so many rounds."""
        s = self.scenario
        read_ms = s.read_ms * sum(s.config.groups or ())  # a step in progress may wait for its batches
        per_round = self.bounds.longest_step_ms + read_ms + 3 * s.sync_ms + s.pass_ms + 8 * s.way_ms
        # An evaluation is cut short, and what is left is the batch that a rank is in.
        tasks_ms = (
            1.5 * s.eval_ms + 2 * s.capture_ms + s.sync_ms + 12 * s.way_ms if self.bounds.stands else 0.0
        )
        if s.links is not None:
            tasks_ms += self.bounds.standstill_ms
        if s.loss is not None and rule != "L8":
            tasks_ms += s.loss.detect_ms  # until then the others wait for the lost machine
        self._end_by.append((now_ms + rounds * per_round + tasks_ms + 1.0, rule))

    def left(self, rank: int) -> None:
        """A rank has left."""
        self._here.discard(rank)
        self._waits.pop(rank, None)
        self.is_moving[rank] = False
        self.standing.is_gone(rank)

    def exits(self, fact: Exiting, now_ms: float, *, may: bool, goes_on: bool) -> None:
        """The coordinator hears that a rank has failed.

        Args:
            fact: What it hears.
            now_ms: The time.
            may: The others can go on without it, and shall.
            goes_on: They do.
        """
        if may != goes_on:
            raise Violation("S20", f"{fact}: the others {'go' if goes_on else 'do not go'} on without it")
        if not goes_on:
            self.fails(now_ms)

    def fails(self, now_ms: float) -> None:
        """The coordinator knows that the run fails."""
        self._reasons.append("failure")
        self.must_end("L2", now_ms, rounds=2)

    def loses_machine(self, error: str, ranks: Sequence[int], now_ms: float) -> None:
        """The coordinator is about to hear that a machine is lost, some of whose ranks had not left."""
        self._lost_machine = error
        self._reasons.append("failure")
        self.must_end("L8", now_ms, rounds=2)
        for rank in ranks:
            self.left(rank)

    def loses(self, rank: int) -> None:
        """The run goes on without a rank; see `Effect.lose`."""
        self._lost.add(rank)
        self.effect.lose(rank)

    def passes(self, now_ms: float) -> None:
        """Time passes."""
        self._at_once = self._at_once + 1 if now_ms == self._now_ms else 0
        self._now_ms = now_ms
        if self._at_once > AT_ONCE:
            raise Violation("L1", f"time stands still at {now_ms} ms")
        if now_ms > self.bounds.longest_run_ms:
            raise Violation("L1", f"still running after {now_ms:.0f} ms of virtual time")
        if self._waits and not self._end_by:
            self._judge_waits(now_ms)
        for by_ms, rule in self._end_by:
            if now_ms > by_ms and self._here:
                raise Violation(rule, f"ranks {sorted(self._here)} have not left at {now_ms:.1f} ms")

    def stands_still(self, states: str) -> None:
        """Nothing is left to happen, and the run is not over."""
        rule = self._end_by[0][1] if self._end_by else "L5" if self._waits else "L1"
        raise Violation(rule, f"nothing is left to happen: {states}")

    # ------------------------------------------------------------------ data of unknown length
    def read_end(self, end: DataEnded, now_ms: float) -> None:
        """The reader has found where an epoch ends."""
        self._ends_ms[end.epoch, end.machine] = now_ms

    def knows_end(self, end: DataEnded) -> None:
        """The coordinator hears of it."""
        self._ends.setdefault(end.epoch, []).append(end)

    def waits(self, rank: int, key: tuple[int, int], now_ms: float) -> None:
        """A rank waits for a batch that has not been read."""
        self.is_moving[rank] = False
        if rank not in self._waits or self._waits[rank][0] != key:
            self._waits[rank] = (key, now_ms)

    def goes_on(self, rank: int) -> None:
        """A rank waits no longer for a batch."""
        self._waits.pop(rank, None)

    def _judge_waits(self, now_ms: float) -> None:
        for rank, ((epoch, batch), since_ms) in self._waits.items():
            ended_ms = self._ends_ms.get((epoch, batch % self.scenario.streams))
            if not self.scenario.exists(epoch, batch) and ended_ms is not None:
                # One message to the coordinator, and one to the rank.
                by_ms = max(since_ms, ended_ms) + 2 * self.scenario.way_ms
                if now_ms > by_ms + 1e-6:
                    raise Violation("L5", f"rank {rank} waits for batch {batch} of epoch {epoch}")

    # ------------------------------------------------------------------ steps and rounds
    def step_begins(self, rank: int, key: tuple[int, int], position: int) -> None:
        """A rank begins a step."""
        self.is_moving[rank] = True
        self.standing.moves(rank, key)
        if self.is_paused:
            raise Violation("S10", f"rank {rank} begins {key} while the run is paused")
        if position < self._base[rank]:
            raise Violation(
                "S13", f"rank {rank} stands at {position} with {key}, the mean at {self._base[rank]}"
            )
        if self._leads is not None:
            self._leads.step_begins(rank, self.steps, self.is_moving)
        if self._lead is not None:
            own = self._uncredited(rank)
            for other, is_moving in enumerate(self.is_moving):
                lead = own - self._uncredited(other)
                if is_moving and self._same_round(rank, other) and lead > self._lead:
                    raise Violation("S6", f"rank {rank} leads rank {other} by {lead}")

    def step_ends(self, rank: int, step: Step) -> None:
        """A rank has taken a step."""
        if self._windows is not None and step.part is not None:
            self._windows.trained(step)
        self.effect.stepped(rank, step)

    def reports(self, rank: int, done: Done, steps: int) -> None:
        """A rank reports an order, after so many steps since its last report."""
        if steps != done.steps:
            raise Violation("S4", f"rank {rank} took {steps} steps for {done}")

    def idles(self, rank: int) -> None:
        """A rank has nothing to do."""
        self.is_moving[rank] = False

    def enters(self, rank: int) -> None:
        """A rank enters the gate."""
        self.is_moving[rank] = False
        self.standing.moves(rank, "the gate")

    def met(self, rank: int, outcome: Outcome) -> None:
        """A rank leaves the gate with an outcome."""
        mine = self.outcomes[rank]
        mine.append(outcome)
        if len(mine) > self.bounds.most_rounds:
            raise Violation("L1", f"the run has not come to its end in {len(mine)} rounds")
        for other, theirs in enumerate(self.outcomes):
            if len(theirs) >= len(mine):
                self._levels.judge_same(rank, outcome, other, theirs[len(mine) - 1])
        if rank == outcome.members[0]:
            self.standing.met(outcome)
            nothing = self.standing.weightless
            held = [0 if r in nothing else samples for r, samples in enumerate(self.effect.samples)]
            self._levels.held(outcome, held, self.standing.dead)
        weight = 0 if rank in self.standing.weightless else self.effect.samples[rank]
        true = (self._uncredited(rank), weight)
        if (outcome.steps[rank], outcome.samples[rank]) != true:
            raise Violation("S2", f"rank {rank} took (steps, samples) {true}, not those of {outcome}")
        self.effect.met(rank, outcome.steps[rank])
        self._base[rank] = outcome.global_step
        if self._leads is not None:
            self._leads.met(rank, self.steps[rank])
        if rank == outcome.members[0]:
            self._obeys(outcome)
            if self._windows is not None:
                for window in self._windows.held(outcome):
                    self.effect.is_trained(*window)

    def snapped(self, rank: int, round: int, steps: int, samples: int) -> None:
        """A rank has put its snapshot down."""
        self.standing.snapped(rank, round, samples)
        weight = 0 if self.standing.is_bad(rank) else self.effect.samples[rank]
        if (steps, samples) != (self._uncredited(rank), weight):
            raise Violation("S8", f"rank {rank} says {steps} steps, {samples} samples, and it is {weight}")
        self._snapshots[rank] = _Snapshot(round, steps, samples)
        if self._leads is not None:
            self._leads.snapped(rank, self.steps[rank])

    def averages(self, round: int, samples: tuple[int, ...]) -> None:
        """The snapshots of a round are averaged."""
        self.standing.averages(round)
        if any(snapshot.round != round for snapshot in self._snapshots):
            raise Violation("S8", f"round {round} averages {self._snapshots}")
        if samples != tuple(snapshot.samples for snapshot in self._snapshots):
            raise Violation("S8", f"round {round} weighs {self._snapshots} with {samples}")

    def applied(self, rank: int, round: int) -> None:
        """A rank has applied the mean of a round to its replica."""
        snapshot = self._snapshots[rank]
        if snapshot.round != round:
            raise Violation("S8", f"rank {rank} applies round {round} to {snapshot}")
        self.effect.met(rank, snapshot.steps)
        self._base[rank] = self._mean_steps[round]
        if self._leads is not None:
            self._leads.applied(rank)

    def ordered(self, rank: int, order: Order, *, is_gone: bool, stirs: Sequence[str] = ()) -> None:
        """The coordinator sends an order."""
        if is_gone:
            raise Violation("S3", f"{order} goes to rank {rank}, which has left")
        if isinstance(order, BarrierTask):
            self.standing.ordered(rank, order, ", ".join(stirs))
        if isinstance(order, StartEpoch):
            self.standing.told(rank, order)
        if isinstance(order, StartEpoch) and order.pace is not None and order.pace.quota < 1:
            raise Violation("S5", f"{order} has a quota below 1")
        if isinstance(order, StartEpoch):
            if order.batches and order.epoch >= self._started:
                raise Violation("S29", f"{order} comes before its epoch begins")
            for end in self._ends.get(order.epoch, ()):
                if not all(map(end.has, order.batches)):
                    raise Violation("S14", f"{order} goes beyond {end}")
        if isinstance(order, Update):
            self._mean_steps[order.round] = order.global_step

    def delivered(self, rank: int, order: Order) -> None:
        """An order has come into the inbox of a rank."""
        if self._leads is not None:
            self._leads.delivered(rank, order)

    def reported(self, record: RoundEnded, quotas: tuple[int, ...], now_ms: float = 0.0) -> None:
        """A round is over; the next one has these quotas."""
        if min((quota for rank, quota in enumerate(quotas) if rank not in self._lost), default=1) < 1:
            raise Violation("S5", f"quotas {quotas}")
        self.standing.reported(record, now_ms)
        for wish in self._waiting:
            self._waiting[wish] += 1
            if self._waiting[wish] > self.scenario.patience:
                raise Violation("L4", f"{wish} was not obeyed in {self.scenario.patience} rounds")
        if record.global_step < self.global_step:
            raise Violation("S4", f"global step fell from {self.global_step} to {record.global_step}")
        if record.global_step != self.global_step + (
            # A round of windows that one rank trains alone has as many steps.
            sum(record.steps) if self._windows is None else max(record.rounds, *record.steps)
        ):
            raise Violation("S4", f"{record} follows global step {self.global_step}")
        self.global_step = record.global_step
        self._rounds[record.epoch] += record.rounds
        if record.epoch in self.epochs:
            raise Violation("S7", f"{record} comes after the record of its epoch")
        options = self.scenario.config.cadence
        most = 200 if options.max_anchor is None else max(1, options.max_anchor)
        if not 1 <= record.anchor <= max(most, options.anchor):
            raise Violation("S5", f"anchor {record.anchor} of {options}")
        if self.bounds.is_steady and record.anchor > max(options.anchor, self._dear_anchor):
            raise Violation("S5", f"anchor {record.anchor}, where averaging asks for {self._dear_anchor}")

    def _is_all(self, epoch: int, batches: int, steps: int) -> bool:
        """Whether so much is all of an epoch, or as far as the run goes."""
        dealt = self.scenario.dealt(epoch)
        if self.scenario.streams == 1 or self.scenario.config.max_steps is None:
            return batches == dealt
        return batches <= dealt and steps == min(
            self.scenario.planned_steps(epoch), self.scenario.room(epoch)
        )

    @property
    def _dear_anchor(self) -> int:
        """Steps in a round of which averaging takes no more than its target, whichever rank was measured."""
        scenario = self.scenario
        step_ms = min(scenario.ms_per_step) * scenario.config.cadence.overhead_target
        averaging_ms = scenario.sync_ms
        if scenario.links is not None:
            # Of a round: that of its machine, and its part of the one of all machines.
            averaging_ms += (scenario.sync_ms + scenario.links.mean_ms) / scenario.config.inner_rounds
        return math.ceil(1.01 * averaging_ms / step_ms)

    def starts(self, epoch: int) -> None:
        """The first batches of an epoch are about to be dealt."""
        if epoch != self._started:
            raise Violation("S29", f"epoch {epoch} begins, and {self._started} is the next one")
        self._started += 1

    def ended(self, metrics: EpochMetrics) -> None:
        """An epoch is complete."""
        if metrics.epoch != self._first_epoch + len(self.epochs):
            raise Violation("S7", f"epoch {metrics.epoch} is reported after {self.epochs}")
        self.epochs.append(metrics.epoch)
        if metrics.epoch == self._again:  # its counts were judged before
            self._complete += 1
            self.standing.ended(metrics)
            return
        effect = self.effect
        effect.judge_lost(metrics.epoch)
        trained = [
            batch for (epoch, batch), count in effect.trained.items() if epoch == metrics.epoch and count
        ]
        batches, steps = len(trained), effect.steps_in[metrics.epoch]
        counted = sum(rank.steps for rank in metrics.per_rank)
        if not self._is_all(metrics.epoch, batches, steps) or counted != steps:
            raise Violation(
                "S7", f"epoch {metrics.epoch} ends after {batches} batches, {counted} steps are counted"
            )
        samples = sum(rank.samples for rank in metrics.per_rank)
        due = trained if self.scenario.streams > 1 else range(batches)
        if samples != sum(self.scenario.samples_in(metrics.epoch, batch) for batch in due):
            raise Violation("S7", f"epoch {metrics.epoch} ends after {samples} samples")
        # Of a stream nobody may know that a limit ends it where it ends.
        is_whole = batches == self.scenario.length(metrics.epoch)
        if metrics.is_complete != is_whole and not (is_whole and self.scenario.config.batches is None):
            raise Violation(
                "S7", f"epoch {metrics.epoch} is complete: {metrics.is_complete}, {batches} batches"
            )
        self._complete += metrics.is_complete and metrics.epoch == self._first_epoch + self._complete
        if metrics.rounds != (told := self._rounds[metrics.epoch]):
            raise Violation("S7", f"epoch {metrics.epoch} has {metrics.rounds} rounds, {told} were told of")
        self.standing.ended(metrics)
        if self._windows is not None:
            self._windows.ended(metrics.epoch)

    def saved(self, save: Save, now_ms: float) -> None:
        """All ranks have captured their part of a checkpoint."""
        self.standing.saved(save, now_ms)

    def goes_bad(self, rank: int, *, is_late: bool) -> None:
        """The replica of a rank has NaN or inf parameters from now on."""
        self.standing.goes_bad(rank, is_late=is_late)

    def evaluated(self, result: Evaluation) -> None:
        """A rank has evaluated a batch."""
        self.standing.evaluated(result)

    def healed(self, rank: int) -> None:
        """A rank has copied a healthy replica."""
        self.standing.healed(rank)

    def paused(self, event: Paused, is_somebody_in_a_step: bool) -> None:
        """The run stands still, or goes on."""
        self.is_paused = event.value
        if event.value:
            self.standing.stands(event)
        self._waiting.pop("pause", None)
        if event.value and is_somebody_in_a_step:
            raise Violation("S10", "the run says that it stands still while a rank is in a step")

    def over(self, finish: Finish, coordinator: Coordinator) -> None:
        """The run is over: judge it as a whole."""
        self.finish = finish
        mine = [self.outcomes[rank] for rank in range(len(self.outcomes)) if rank not in self._lost]
        stops = [[o for o in theirs if o.stop] for theirs in mine]
        if self._lost_machine and finish.error is None:
            raise Violation("L8", f"{finish} does not know that {self._lost_machine}")
        if finish.error is None:
            if any(len(theirs) != len(mine[0]) for theirs in mine):
                raise Violation("S11", f"ranks left after {[len(theirs) for theirs in mine]} rounds")
            if any(stop != stops[0] for stop in stops):
                raise Violation("S11", "ranks obeyed the stop in different rounds")
            if self.steps != self.credited:
                raise Violation("S9", f"steps {self.steps} were taken, the last means hold {self.credited}")
            if finish.global_step != self.effect.global_step:
                taken = self.effect.global_step
                raise Violation("S4", f"global step {finish.global_step}, {taken} steps were taken")
        if self._windows is not None:
            self._windows.over(finish)
        if finish.error is None and not finish.stopped and not self.standing.is_enough:
            self._judge_complete(finish)
        may_end = self._reasons or (finish.error and self.scenario.differs)
        if (finish.stopped or finish.error is not None) and not may_end:
            raise Violation("L1", f"nobody ended the run, and it ended early: {finish}")
        self.standing.over(finish)
        check(coordinator)

    def _judge_complete(self, finish: Finish) -> None:
        scenario, epochs = self.scenario, self.scenario.config.epochs or 0
        if scenario.streams == 1:
            due = {(e, batch) for e in range(epochs) for batch in range(scenario.dealt(e))}
        else:
            due = {(e, batch) for e in range(epochs) for batch in scenario.numbers(e)}
            if scenario.config.max_steps is not None:  # S7 counts them; which ones depends on the speeds
                due &= self.effect.trained.keys()
        self.effect.judge_missing(due)
        expected = [e for e in range(self._first_epoch, epochs) if self.scenario.dealt(e)]
        if self.epochs != expected or finish.epochs_done != self._first_epoch + self._complete:
            raise Violation("S7", f"only the epochs {self.epochs} were reported, and {finish}")
        if beyond := {epoch for epoch in +self._rounds if epoch not in self.epochs}:
            raise Violation("S7", f"rounds of the epochs {beyond} were told, which the run does not have")

    def _uncredited(self, rank: int) -> int:
        return self.effect.uncredited(rank)

    def _obeys(self, outcome: Outcome) -> None:
        for wish in ["pause"] * outcome.pause + [one.what for one in outcome.lr]:
            self._obeyed[wish] += 1
            if self._obeyed[wish] > self._wished[wish]:
                raise Violation("S12", f"{outcome} obeys {wish} again")
            if wish in RATES and self._obeyed[wish] == self._wished[wish]:
                self._waiting.pop(wish, None)

    def _same_round(self, rank: int, other: int) -> bool:
        return len(self.outcomes[rank]) == len(self.outcomes[other])
