"""Planted bugs, to test the rules: each must be found within the first seeds, by the rule it breaks.

A mutant that survives means that a rule or a kind of trouble is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flowdp.machine.armed_rounds import ArmedRounds, HeldRounds
from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.barrier_tasks import Barrier, BarrierPlan, SavePlan, Schedule
from flowdp.machine.config import CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.gate import GateState, PartState
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.rounds import Constraints
from flowdp.machine.worker import Action, Done, Enter, Leave, Serve, Step, WorkerMachine
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.exclusion import Exclusion
from flowdp.policy.ledger import ENDLESS, Deal, Ledger
from flowdp.policy.recovery import OutlierFilter
from flowdp.policy.save_budget import SaveBudget
from flowdp.policy.shares import part_sizes
from flowdp.policy.streams_ledger import StreamsLedger
from flowdp.policy.tally import EpochMetrics, RankSums
from flowdp.protocol.commands import (
    AbortGate,
    Command,
    EpochEnded,
    EvaluationEnded,
    Finish,
    Send,
)
from flowdp.protocol.messages import (
    Abort,
    Arrival,
    DataEnded,
    Directives,
    Exiting,
    Fact,
    Failed,
    Order,
    Outcome,
    Requested,
    RequestParams,
    Shutdown,
    SnapshotReady,
    StartEpoch,
    SyncAck,
    SyncNow,
    Throttle,
    Tick,
    Work,
)
from flowdp.protocol.position import Position
from tests.simulator.cluster import JudgedWorld, Machines
from tests.simulator.effect import Effect
from tests.simulator.faults import Disturbance, Scenario, draw
from tests.simulator.lives import play
from tests.simulator.machines import Links
from tests.simulator.rank import FaultyRank
from tests.simulator.rules import Violation
from tests.simulator.scenario import Loss, Wish

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Lives:
    """The first so many seeds with barrier tasks and several lives."""

    count: int

    def seeds(self) -> list[int]:
        return [seed for seed in range(5 * self.count) if seed % 15 in (1, 8, 12)]


@dataclass(frozen=True)
class OnMachines:
    """The first so many seeds with several machines."""

    count: int

    def seeds(self) -> list[int]:
        return [seed for seed in range(9 * self.count) if seed % 17 in (10, 14)][: self.count]


Where = int | Lives | OnMachines | Scenario


@dataclass(frozen=True)
class Mutant:
    """A bug and how it must be found.

    `where` is a number of seeds, the seeds, or a scenario in which the bug is cheap to find.
    """

    rule: str
    where: Where
    plant: Callable[[Patch], Machines | None]
    world: type[JudgedWorld] = JudgedWorld


MUTANTS: dict[str, Mutant] = {}


def mutant(rule: str, where: Where, world: type[JudgedWorld] = JudgedWorld) -> Callable[[Any], Any]:
    """Register what plants a bug: patches production code, or answers with other machines."""

    def register(plant: Callable[[Patch], Machines | None]) -> Callable[[Patch], Machines | None]:
        MUTANTS[plant.__name__] = Mutant(rule, where, plant, world)
        return plant

    return register


def violations(planted: Mutant, patch: Patch) -> list[str]:
    """The rules that broke, run by run, until the expected one did."""
    machines = planted.plant(patch)
    found: list[str] = []
    where = planted.where
    seeds = (
        where.seeds()
        if isinstance(where, Lives | OnMachines)
        else range(where)
        if isinstance(where, int)
        else []
    )
    for scenario in [where] if isinstance(where, Scenario) else map(draw, seeds):
        try:
            play(scenario, machines, world=planted.world)
        except Violation as violation:
            found.append(violation.rule)
            if violation.rule == planted.rule:
                break
    return found


# ---------------------------------------------------------------- three wrong readings of a stop
class StopByInbox(Coordinator):
    """Tells every rank to leave by its inbox, and hears nothing but their leaving from then on."""

    told = False

    def _take(self, fact: Fact, now_ms: float) -> list[Command]:
        if self.told:
            return [] if not isinstance(fact, Exiting) else super()._take(fact, now_ms)
        if isinstance(fact, Requested) and fact.what == "stop" and self.phase is Phase.RUNNING:
            self.told = True
            return [Send(rank, Shutdown()) for rank in self._present()]
        return super()._take(fact, now_ms)

    def _take_exit(self, fact: Exiting, now_ms: float) -> list[Command]:
        if self.told and fact.error is None:
            self._gone.add(fact.rank)
            return []
        return super()._take_exit(fact, now_ms)

    def _decide(self, now_ms: float) -> list[Command]:
        if not self.told or self.error is not None:
            return super()._decide(now_ms)
        if len(self._gone) < self.config.world_size or self.phase is Phase.DONE:
            return []
        self.phase = Phase.DONE
        return [Finish(None, True, self.global_step, self.epochs.done)]

    def check(self) -> None:
        if not self.told:
            super().check()


@mutant("L3", 100)
def a_stop_is_obeyed_where_it_is_read(patch: Patch) -> Machines:
    return Machines(coordinator=StopByInbox)


class MeetAndLeave(WorkerMachine):
    """Reads a stop as: enter the gate with what there is, average, leave."""

    stops = False

    def handle(self, order: Order) -> None:
        if isinstance(order, Shutdown) and self._order is not None and self._order.sync is not None:
            self.stops = True
            self._sync_now = 2**61
        else:
            super().handle(order)

    def met(self, outcome: Outcome) -> Any:
        done = super().met(outcome)
        if self.stops:
            self._leave = Leave(None)
        return done


@mutant("L3", 100)
def a_stop_means_average_and_leave(patch: Patch) -> Machines:
    return Machines(coordinator=StopByInbox, worker=MeetAndLeave)


class FinishAndLeave(WorkerMachine):
    """Reads a stop as: do what is armed, then leave."""

    stops = False

    def handle(self, order: Order) -> None:
        if isinstance(order, Shutdown):
            self.stops = True
        else:
            super().handle(order)

    def next(self, *, in_step: bool = False) -> Action:
        if self.stops and self._order is None:
            return Leave(None)
        return super().next(in_step=in_step)


class LeavingWorld(JudgedWorld):
    """A rank that ends takes itself out of the gate, so that nobody waits for it."""

    def leave(self, number: int, error: str | None = None, *, is_alone: bool = False) -> None:
        super().leave(number, error, is_alone=is_alone)
        self.leave_gate(number)


@mutant("S11", 100, LeavingWorld)
def a_stop_is_obeyed_after_what_is_armed(patch: Patch) -> Machines:
    return Machines(coordinator=StopByInbox, worker=FinishAndLeave)


# ---------------------------------------------------------------- rounds
@mutant("S4", 20)
def a_phantom_step_for_each_acknowledgment(patch: Patch) -> None:
    take = PlannedRounds.take

    def counting(self: PlannedRounds, fact: Fact, now_ms: float) -> list[Command]:
        commands = take(self, fact, now_ms)
        self.global_step += isinstance(fact, SyncAck)
        return commands

    patch.setattr(PlannedRounds, "take", counting)


@mutant("L2", 100)
def peers_are_not_told_of_a_failure(patch: Patch) -> Machines:
    class Silent(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            def is_told(command: Command) -> bool:
                is_order = isinstance(command, Send) and isinstance(command.order, Abort)
                return not is_order and not isinstance(command, AbortGate)

            return list(filter(is_told, super().handle(fact, now_ms)))

    return Machines(coordinator=Silent)


@mutant("S2", 300)
def answers_come_in_the_order_of_rounds(patch: Patch) -> None:
    take = PlannedRounds.take

    def strict(self: PlannedRounds, fact: Fact, now_ms: float) -> list[Command]:
        first = self._armed[0]
        armed, self._armed = self._armed, type(self._armed)([first])
        try:
            return take(self, fact, now_ms)
        finally:
            self._armed = armed if self._armed else type(armed)(list(armed)[1:])

    patch.setattr(PlannedRounds, "take", strict)


@mutant("S4", 1000)
def a_hurried_round_voids_nothing(patch: Patch) -> Machines:
    class Forgetful(GateState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            return super().enter(replace(arrival, left=0))

    return Machines(gate=Forgetful)


STOPPED = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=2000, epochs=1, cadence=CadenceOptions(anchor=30)),
    ms_per_step=(1.0, 2.0),
    wishes=(Wish(200.0, Requested("stop")),),
)


@mutant("L3", STOPPED)
def a_call_to_the_gate_is_lost(patch: Patch) -> Machines:
    class Deaf(WorkerMachine):
        def handle(self, order: Order) -> None:
            if not isinstance(order, SyncNow):
                super().handle(order)

    return Machines(worker=Deaf)


@mutant("L1", 100)
def a_call_to_the_gate_has_no_end(patch: Patch) -> Machines:
    class Eager(WorkerMachine):
        def handle(self, order: Order) -> None:
            super().handle(SyncNow(2**61) if isinstance(order, SyncNow) else order)

    return Machines(worker=Eager)


@mutant("S2", 100)
def a_worker_keeps_orders_of_void_plans(patch: Patch) -> Machines:
    class Keeping(WorkerMachine):
        def met(self, outcome: Outcome) -> Any:
            orders = list(self._orders)
            done = super().met(outcome)
            self._oldest_plan = 0
            self._orders.extend(orders if not self._orders else ())
            return done

    return Machines(worker=Keeping)


@mutant("S2", 50)
def an_idle_rank_counts_from_its_own_mean(patch: Patch) -> Machines:
    class Behind(WorkerMachine):
        def next(self, *, in_step: bool = False) -> Action:
            action = super().next(in_step=in_step)
            if isinstance(action, Enter) and action.arrival.steps == 0:
                arrival = replace(action.arrival, global_step=self.total_steps)
                return Enter(arrival)
            return action

    return Machines(worker=Behind)


@mutant("S2", 20)
def the_planned_samples_are_the_weights(patch: Patch) -> Machines:
    class Planned(WorkerMachine):
        def trained(self, samples: int) -> None:
            super().trained(8)

    return Machines(worker=Planned)


@mutant("L3", 300)
def a_stop_waits_for_the_end_of_the_data(patch: Patch) -> None:
    decide = PlannedRounds.decide

    def deaf(self: PlannedRounds, now_ms: float, constraints: Constraints) -> list[Command]:
        return decide(self, now_ms, replace(constraints, hold=False))

    patch.setattr(PlannedRounds, "decide", deaf)
    patch.setattr(GateState, "direct", lambda self, directives: None)


# ---------------------------------------------------------------- the ledger and the epochs
@mutant("S1", 20)
def a_batch_is_dealt_twice(patch: Patch) -> None:
    deal = Ledger.deal

    def overlapping(self: Ledger, *asked: Any) -> Deal:
        hands = deal(self, *asked)
        return tuple((*hand[:-1], hand[0]) if len(hand) > 1 else hand for hand in hands)

    patch.setattr(Ledger, "deal", overlapping)


@mutant("S7", 100)
def left_overs_are_lost(patch: Patch) -> None:
    count_back = Ledger.count_back

    def all_trained(self: Ledger, rank: int, batches: Sequence[int], _steps: int) -> None:
        count_back(self, rank, batches, len(batches))

    patch.setattr(Ledger, "count_back", all_trained)


@mutant("S7", 300)
def epochs_are_reported_as_they_complete(patch: Patch) -> None:
    def ended(self: Epochs, now_ms: float, anchor: int, global_step: int, **_: Any) -> list[EpochMetrics]:
        records = []
        for epoch in list(self._open):
            if epoch.ledger.is_complete:
                self._open.remove(epoch)
                self.done += 1
                records.append(epoch.tally.result(1.0, anchor, global_step, self.epochs))
        return records

    patch.setattr(Epochs, "ended", ended)
    patch.setattr(Epochs, "check", lambda self: None)
    patch.setattr(Epochs, "_is_open", lambda self, number: any(e.ledger.epoch == number for e in self._open))


@mutant("S7", 300)
def the_last_epoch_does_not_wait_for_its_rounds(patch: Patch) -> None:
    ended = Epochs.ended
    patch.setattr(Epochs, "ended", lambda self, *now, is_idle: ended(self, *now))


@mutant("S5", 50)
def a_slow_rank_gets_no_quota(patch: Patch) -> None:
    quotas = Cadence.quotas.fget
    assert quotas is not None

    def starving(self: Cadence) -> tuple[int, ...]:
        fair = quotas(self)
        return fair if len(set(fair)) == 1 else tuple(0 if q == min(fair) else q for q in fair)

    patch.setattr(Cadence, "quotas", property(starving))


SHORT_LAST_ROUNDS = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=61, epochs=4, policy="cadence"),
    ms_per_step=(20.0, 20.0),
    sync_ms=4.0,
)


@mutant("S5", SHORT_LAST_ROUNDS)
def a_short_round_stretches_all_others(patch: Patch) -> None:
    patch.setattr(Cadence, "round_ms", 0.0)


@mutant("S6", 1000)
def a_lead_has_no_limit(patch: Patch) -> None:
    fit = Cadence._fit

    def unlimited(self: Cadence) -> tuple[int, ...]:
        limited, self.options = self.options, replace(self.options, max_batch_diff=None)
        try:
            return fit(self)
        finally:
            self.options = limited

    patch.setattr(Cadence, "_fit", unlimited)


# ---------------------------------------------------------------- epochs of unknown length
@mutant("L5", 100)
def the_end_of_the_data_is_not_passed_on(patch: Patch) -> Machines:
    class Silent(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            commands = super().handle(fact, now_ms)
            return [c for c in commands if not (isinstance(c, Send) and isinstance(c.order, DataEnded))]

    return Machines(coordinator=Silent)


@mutant("L5", 100)
def a_worker_waits_for_what_never_existed(patch: Patch) -> Machines:
    class Waiting(WorkerMachine):
        def handle(self, order: Order) -> None:
            if not isinstance(order, DataEnded):
                super().handle(order)

    return Machines(worker=Waiting)


@mutant("S14", 500)
def the_end_of_the_data_is_forgotten_before_the_run_begins(patch: Patch) -> Machines:
    class Late(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            is_early = isinstance(fact, DataEnded) and self.phase is Phase.STARTING
            return super().handle(Tick() if is_early else fact, now_ms)

    return Machines(coordinator=Late)


@mutant("S14", 100)
def one_batch_too_many_is_dealt(patch: Patch) -> None:
    end = Ledger.end
    patch.setattr(Ledger, "end", lambda self, batches, *machine: end(self, batches + 1, *machine))


@mutant("S1", 500)
def max_steps_counts_what_never_existed(patch: Patch) -> None:
    end = Epochs.end

    def forgetful(self: Epochs, ended: DataEnded) -> None:
        planned = self._planned
        end(self, ended)
        self._planned = planned

    patch.setattr(Epochs, "end", forgetful)


STREAMS = Scenario(
    seed=0,
    config=CoordinatorConfig(
        world_size=4, batches=None, epochs=2, cadence=CadenceOptions(anchor=3), machines=(2, 2)
    ),
    ms_per_step=(1.0, 1.5, 1.0, 2.0),
    lengths=(30, 41),
    uneven=True,
    read_ms=0.1,
    links=Links((0.0, 0.5), 1.0),
)


@mutant("S2", STREAMS)
def the_end_of_one_stream_is_taken_for_that_of_another(patch: Patch) -> None:
    end = StreamsLedger.end
    patch.setattr(StreamsLedger, "end", lambda self, batches, machine: end(self, batches, 1 - machine))


@mutant("S14", STREAMS)
def the_end_of_the_other_streams_is_not_heard(patch: Patch) -> Machines:
    class Deaf(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            is_other = isinstance(fact, DataEnded) and fact.machine > 0
            return [] if is_other else super().handle(fact, now_ms)

    return Machines(coordinator=Deaf)


@mutant("S7", STREAMS)
def an_epoch_is_over_with_the_first_stream_that_ends(patch: Patch) -> None:
    def first(self: StreamsLedger) -> int:
        return 0 if any(part.remaining == 0 for part in self._parts) else ENDLESS

    patch.setattr(StreamsLedger, "remaining", property(first))


@mutant("L5", STREAMS)
def batches_of_one_stream_are_dealt_to_all_machines(patch: Patch) -> None:
    deal = StreamsLedger.deal
    patch.setattr(StreamsLedger, "deal", lambda self, *given: tuple(reversed(deal(self, *given))))


# ---------------------------------------------------------------- windows and steps of several batches
@mutant("S15", 200)
def the_last_window_is_taken_for_a_whole_one(patch: Patch) -> None:
    parts = ExactRounds._parts

    def whole(self: ExactRounds, *given: Any) -> Any:
        self._batch = replace(self._batch, samples=10**9)
        return parts(self, *given)

    patch.setattr(ExactRounds, "_parts", whole)


@mutant("S16", 300)
def all_ranks_train_the_windows_of_one_alone(patch: Patch) -> None:
    parts = ExactRounds._parts
    patch.setattr(ExactRounds, "_parts", lambda self, windows, _: parts(self, windows, self.ratios))


@mutant("S1", 500)
def the_windows_of_one_rank_count_as_one(patch: Patch) -> None:
    def by_rounds(self: ExactRounds, held: Any) -> None:
        self.epochs.count_back(held.armed.epoch, 0, held.armed.deal[0], held.rounds)

    patch.setattr(ExactRounds, "_count_back", by_rounds)


@mutant("S15", 200)
def ranks_are_told_of_different_splits(patch: Patch) -> None:
    order = ExactRounds._order

    def moving(self: ExactRounds, block: Any, rank: int) -> Any:
        shares = [1.0 + (other == rank) for other in range(self.world_size)]
        self._next_parts = list(zip(*self._parts(block.deal[0], shares), strict=True))
        return order(self, block, rank)

    patch.setattr(ExactRounds, "_order", moving)


@mutant("S15", 400)
def a_rank_may_get_one_sample_whatever_the_model_needs(patch: Patch) -> None:
    patch.setattr(
        "flowdp.machine.exact_rounds.part_sizes", lambda samples, ratios, _: part_sizes(samples, ratios)
    )


@mutant("S16", 100)
def every_part_counts_as_a_step_of_the_run(patch: Patch) -> Machines:
    class Alone(GateState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            return super().enter(replace(arrival, window=None))

    return Machines(gate=Alone)


@mutant("S16", 100)
def a_rank_stands_a_step_ahead_in_the_schedule(patch: Patch) -> Machines:
    class Ahead(WorkerMachine):
        def _step(self, order: StartEpoch, position: int) -> Step:
            return super()._step(order, position + (order.parts is not None and self.rank == 1))

    return Machines(worker=Ahead)


@mutant("S17", 100)
def nobody_compares(patch: Patch) -> Machines:
    class Trusting(GateState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            window = arrival.window and replace(arrival.window, compare=False)
            return super().enter(replace(arrival, window=window))

    return Machines(gate=Trusting)


@mutant("S17", 1000)
def replicas_that_differ_go_on(patch: Patch) -> None:
    patch.setattr("flowdp.machine.exact_rounds._different", lambda acks: [])


@mutant("S1", 200)
def windows_are_never_counted_back(patch: Patch) -> None:
    count_back = ExactRounds._count_back

    def none(self: ExactRounds, held: HeldRounds) -> None:
        count_back(self, replace(held, outcome=replace(held.outcome, round=held.armed.sync.round - 1)))

    patch.setattr(ExactRounds, "_count_back", none)


@mutant("S1", 200)
def a_step_is_counted_back_as_one_batch(patch: Patch) -> None:
    count_back = Ledger.count_back

    def short(self: Ledger, rank: int, batches: Any, steps: int) -> None:
        groups, self.groups = self.groups, (1,) * len(self.groups)
        count_back(self, rank, batches, steps)
        self.groups = groups

    patch.setattr(Ledger, "count_back", short)


# ---------------------------------------------------------------- snapshots
@mutant("S8", 1500)
def a_late_answer_counts_for_the_next_round(patch: Patch) -> None:
    take = AsyncRounds.take

    def gullible(self: AsyncRounds, fact: Fact, now_ms: float) -> list[Command]:
        if isinstance(fact, SnapshotReady) and self._round is not None:
            fact = replace(fact, round=self._round.number)
        return take(self, fact, now_ms)

    patch.setattr(AsyncRounds, "take", gullible)


@mutant("L1", 50)
def the_end_of_the_data_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Epochs, "is_exhausted", False)


@mutant("S9", 50)
def the_run_ends_without_a_last_mean(patch: Patch) -> None:
    patch.setattr(AsyncRounds, "_is_dirty", False)
    patch.setattr(Coordinator, "_position", lambda own, now_ms: Position(1))  # would say that batches are out


SLOW_LINKS = Scenario(
    seed=0,
    config=CoordinatorConfig(
        world_size=4, batches=16, epochs=1, policy="async", cadence=CadenceOptions(anchor=1)
    ),
    ms_per_step=(1.0, 1.0, 1.0, 1.0),
    latency_ms=20.0,
)


@mutant("L1", SLOW_LINKS)
def a_short_timeout_is_never_doubled(patch: Patch) -> None:
    constant = property(lambda self: 2.0, lambda self, value: None)
    patch.setattr(AsyncRounds, "_timeout_ms", constant, raising=False)


@mutant("S8", 500)
def steps_of_an_abandoned_round_are_lost(patch: Patch) -> Machines:
    class Losing(WorkerMachine):
        def handle(self, order: Order) -> None:
            if isinstance(order, RequestParams) and self._snapshot is not None:
                self.steps -= self._snapshot.steps
                self.samples -= self._snapshot.samples
                self._snapshot = None
            super().handle(order)

    return Machines(worker=Losing)


@mutant("S4", 500)
def steps_of_an_abandoned_round_count_twice(patch: Patch) -> None:
    abandon = AsyncRounds._abandon

    def crediting(self: AsyncRounds, round_: Any) -> Command:
        self.global_step += sum(snapshot.steps for snapshot in round_.snapshots.values())
        return abandon(self, round_)

    patch.setattr(AsyncRounds, "_abandon", crediting)


@mutant("S6", 100)
def a_throttle_is_lost(patch: Patch) -> Machines:
    class Lax(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            commands = super().handle(fact, now_ms)
            return [c for c in commands if not (isinstance(c, Send) and isinstance(c.order, Throttle))]

    return Machines(coordinator=Lax)


@mutant("S6", 100)
def a_throttle_comes_behind_its_orders(patch: Patch) -> None:
    deal = AsyncRounds._deal

    def late(self: AsyncRounds, now_ms: float) -> list[Command]:
        commands = deal(self, now_ms)
        return sorted(commands, key=lambda c: isinstance(c, Send) and isinstance(c.order, Throttle))

    patch.setattr(AsyncRounds, "_deal", late)


@mutant("S6", 100)
def a_rank_goes_on_beyond_its_throttle(patch: Patch) -> Machines:
    class Deaf(WorkerMachine):
        def handle(self, order: Order) -> None:
            if not isinstance(order, Throttle):
                super().handle(order)

    return Machines(worker=Deaf)


@mutant("L1", 100)
def a_throttled_rank_is_never_released(patch: Patch) -> Machines:
    class Stuck(WorkerMachine):
        def handle(self, order: Order) -> None:
            if isinstance(order, Throttle) and self._throttle is not None:
                order = replace(order, limit=min(order.limit, self._throttle.limit))
            super().handle(order)

    return Machines(worker=Stuck)


@mutant("S13", 50)
def a_worker_forgets_where_the_mean_stands(patch: Patch) -> Machines:
    class Lost(WorkerMachine):
        def applied(self, round: int, global_step: int) -> None:
            super().applied(round, 0)

    return Machines(worker=Lost)


# ---------------------------------------------------------------- wishes
@mutant("S12", 300)
def directives_are_not_consumed(patch: Patch) -> Machines:
    class Sticky(GateState):
        def _complete(self) -> Outcome | None:
            before = self.directives
            outcome = super()._complete()
            self.directives = before
            return outcome

    return Machines(gate=Sticky)


@mutant("S12", 300)
def a_learning_rate_is_told_with_every_wish(patch: Patch) -> Machines:
    class Repeating(Coordinator):
        lr: float | None = None

        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            if isinstance(fact, Requested):
                self.lr = fact.value or self.lr
                self._new_lr = self.lr
            return super().handle(fact, now_ms)

    return Machines(coordinator=Repeating)


@mutant("L4", 300)
def a_learning_rate_is_forgotten(patch: Patch) -> Machines:
    class Forgetful(GateState):
        def direct(self, directives: Directives) -> None:
            super().direct(replace(directives, lr=None))

    return Machines(gate=Forgetful)


@mutant("S10", 100)
def a_pause_does_not_wait_for_the_ranks(patch: Patch) -> Machines:
    class Hasty(Coordinator):
        def _run(self, now_ms: float) -> list[Command]:
            if self._wants_pause and not self.is_paused:
                return self._stand_still()
            return super()._run(now_ms)

    return Machines(coordinator=Hasty)


@mutant("S3", 300)
def orders_go_to_ranks_that_left(patch: Patch) -> Machines:
    class Careless(Coordinator):
        def _present(self) -> list[int]:
            return list(range(self.config.world_size))

    return Machines(coordinator=Careless)


# ---------------------------------------------------------------- standstills
@mutant("S18", Lives(100))
def a_barrier_task_does_not_wait_for_the_ranks(patch: Patch) -> Machines:
    class Hasty(Coordinator):
        def _run(self, now_ms: float) -> list[Command]:
            if self.barrier.is_wanted and not self.rounds.is_idle:
                return self._stand(now_ms)
            return super()._run(now_ms)

    return Machines(coordinator=Hasty)


@mutant("S18", Lives(100))
def training_goes_on_while_a_barrier_task_is_out(patch: Patch) -> None:
    is_wanted = Barrier.is_wanted.fget
    assert is_wanted is not None
    patch.setattr(Barrier, "is_wanted", property(lambda self: self._asked is None and is_wanted(self)))


@mutant("S19", Lives(200))
def a_position_forgets_the_left_overs(patch: Patch) -> None:
    position = Epochs.position

    def short(self: Epochs, now_ms: float) -> Any:
        done, planned, open_ = position(self, now_ms)
        return done, planned, tuple(replace(one, left=((),) * self.world_size) for one in open_)

    patch.setattr(Epochs, "position", short)


@mutant("S19", Lives(200))
def a_cut_epoch_is_saved_as_a_whole_one(patch: Patch) -> None:
    position = Epochs.position

    def without(self: Epochs, now_ms: float) -> Any:
        cut, self._cut = self._cut, []
        stands = position(self, now_ms)
        self._cut = cut
        return stands

    patch.setattr(Epochs, "position", without)


@mutant("S7", Lives(200))
def a_cut_epoch_is_told_as_a_whole_one(patch: Patch) -> None:
    patch.setattr("flowdp.machine.epochs._Open.is_cut", False)


@mutant("S1", Lives(100))
def what_was_trained_before_a_resume_is_dealt_again(patch: Patch) -> None:
    patch.setattr(Ledger, "resume", lambda self, position, left: None)


@mutant("S7", Lives(500))
def left_overs_do_not_survive_a_resume(patch: Patch) -> None:
    resume = Ledger.resume

    def without(self: Ledger, position: int, left: Any) -> None:
        resume(self, position, [() for _ in left])

    patch.setattr(Ledger, "resume", without)


@mutant("S4", Lives(100))
def a_resumed_run_counts_its_steps_anew(patch: Patch) -> None:
    for rounds in (PlannedRounds, AsyncRounds):
        patch.setattr(rounds, "resume", lambda self, position: None)


@mutant("S7", Lives(100))
def the_sums_of_an_epoch_do_not_survive_a_resume(patch: Patch) -> None:
    resume = Epochs.resume

    def forgetful(self: Epochs, position: Position) -> None:
        empty = tuple(replace(one, sums=tuple(RankSums() for _ in one.sums)) for one in position.open)
        resume(self, replace(position, open=empty))

    patch.setattr(Epochs, "resume", forgetful)


@mutant("S7", Lives(300))
def a_resumed_run_reports_from_its_beginning(patch: Patch) -> None:
    resume = Epochs.resume

    def forgetful(self: Epochs, position: Position) -> None:
        resume(self, replace(position, done=0, open=()))

    patch.setattr(Epochs, "resume", forgetful)
    patch.setattr(Effect, "is_trained", lambda self, epoch, batch: None)


@mutant("S13", Lives(300))
def a_worker_of_a_resumed_run_stands_at_its_beginning(patch: Patch) -> Machines:
    class Young(WorkerMachine):
        def __init__(self, rank: int, global_step: int = 0) -> None:
            super().__init__(rank)

    return Machines(worker=Young)


@mutant("S20", Lives(500))
def what_a_lost_rank_did_since_the_mean_counts(patch: Patch) -> None:
    count_back = Ledger.count_back

    def trusting(self: Ledger, rank: int, batches: Any, steps: int) -> None:
        count_back(self, rank, batches, self.steps(rank, batches) if steps == 0 else steps)

    patch.setattr(Ledger, "count_back", trusting)


@mutant("S20", Lives(100))
def one_failure_ends_the_run_of_all(patch: Patch) -> None:
    patch.setattr(Coordinator, "_may_go_on", lambda self: False)


@mutant("S4", Lives(500))
def what_a_lost_rank_did_before_the_mean_is_forgotten(patch: Patch) -> None:
    work = ArmedRounds._work

    def forgetful(self: ArmedRounds, rank: int, outcome: Outcome, unreported_samples: int) -> Work:
        done = work(self, rank, outcome, unreported_samples)
        return done if rank in self.acks else replace(done, steps=0)

    patch.setattr(ArmedRounds, "_work", forgetful)


@mutant("S7", Lives(300))
def a_lost_rank_says_nothing_of_its_samples(patch: Patch) -> Machines:
    class Silent(WorkerMachine):
        def met(self, outcome: Outcome) -> Done | None:
            done = super().met(outcome)
            self.unreported_samples = 0
            return done

    return Machines(worker=Silent)


@mutant("S21", Lives(100))
def a_bad_replica_weighs_what_it_trained(patch: Patch) -> Machines:
    class Trusting(GateState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            return super().enter(replace(arrival, bad=False))

    return Machines(gate=Trusting)


@mutant("S21", Lives(500))
def no_gate_hears_of_a_late_verdict(patch: Patch) -> None:
    read = FaultyRank.read

    def silent(self: FaultyRank) -> None:
        is_bad = self.machine.is_bad
        read(self)
        self.machine.is_bad = is_bad

    patch.setattr(FaultyRank, "read", silent)


@mutant("S21", Lives(500))
def no_acknowledgment_tells_a_late_verdict(patch: Patch) -> None:
    patch.setattr(HeldRounds, "bad", property(lambda self: dict.fromkeys(self.outcome.bad)))


@mutant("S21", Lives(500))
def a_healed_replica_says_that_it_was_bad(patch: Patch) -> Machines:
    class Remembering(WorkerMachine):
        def next(self, *, in_step: bool = False) -> Action:
            is_bad = self.is_bad
            action = super().next(in_step=in_step)
            if isinstance(action, Serve):
                self.is_bad = is_bad
            return action

    return Machines(worker=Remembering)


@mutant("S21", Lives(100))
def nobody_heals(patch: Patch) -> None:
    patch.setattr(Barrier, "heal", lambda self, bad: None)


@mutant("S21", Lives(500))
def a_bad_snapshot_is_averaged(patch: Patch) -> None:
    patch.setattr(AsyncRounds, "_is_bad", property(lambda self: False, lambda self, value: None), False)


LATE_AND_BAD = Scenario(
    seed=0,
    config=CoordinatorConfig(
        world_size=2,
        batches=20,
        epochs=4,
        policy="async",
        cadence=CadenceOptions(anchor=2),
        tasks=BarrierPlan(eval_every=1),
    ),
    ms_per_step=(1.0, 1.0),
    late_snapshot=1.0,
    bad_steps=((0, 7),),
    eval_batches=4,
    eval_ms=4000.0,
)


@mutant("L1", LATE_AND_BAD)
def a_bad_snapshot_of_an_abandoned_round_is_never_forgotten(patch: Patch) -> None:
    take = AsyncRounds.take

    def mindful(self: AsyncRounds, fact: Fact, now_ms: float) -> list[Command]:
        self._is_bad |= isinstance(fact, SnapshotReady) and fact.bad
        return take(self, fact, now_ms)

    patch.setattr(AsyncRounds, "take", mindful)
    patch.setattr(AsyncRounds, "wants_meeting", property(lambda self: self._is_bad))


@mutant("S22", Lives(100))
def an_epoch_is_reported_before_its_evaluation(patch: Patch) -> None:
    patch.setattr(Barrier, "ended", lambda self, metrics: [EpochEnded(metrics)])


@mutant("S22", Lives(500))
def an_evaluation_by_steps_comes_again(patch: Patch) -> None:
    finish = Barrier._finish

    def again(self: Barrier, *given: Any) -> list[Command]:
        commands = finish(self, *given)
        self._wants_evaluation |= any(isinstance(command, EvaluationEnded) for command in commands)
        return commands

    patch.setattr(Barrier, "_finish", again)


@mutant("L6", Lives(500))
def an_evaluation_by_steps_is_forgotten(patch: Patch) -> None:
    def look(self: Barrier, now_ms: float, global_step: int) -> None:
        self._wants_save |= self.saves.is_due(now_ms, global_step)

    patch.setattr(Barrier, "look", look)


@mutant("S22", Lives(500))
def a_stop_waits_for_the_evaluation(patch: Patch) -> None:
    decide = Barrier.decide
    patch.setattr(
        Barrier,
        "decide",
        lambda self, now_ms, present, stand, leaves: decide(self, now_ms, present, stand, leaves=False),
    )


@mutant("S22", Lives(500))
def a_position_forgets_the_evaluation_that_a_stop_has_taken(patch: Patch) -> None:
    init = Position.__init__

    def forgetful(self: Position, *given: Any, **named: Any) -> None:
        init(self, *given, **{**named, "owed_epoch": None, "owed_step": False})

    patch.setattr(Position, "__init__", forgetful)


@mutant("S22", Lives(1000))
def a_resumed_run_owes_no_evaluation(patch: Patch) -> None:
    init = Barrier.__init__

    def carefree(
        self: Barrier, tasks: BarrierPlan, position: Position | None = None, *rest: Any, **given: Any
    ) -> None:
        owes_nothing = position and replace(position, owed_epoch=None, owed_step=False)
        init(self, tasks, owes_nothing, *rest, **given)

    patch.setattr(Barrier, "__init__", carefree)


@mutant("S22", Lives(1000))
def an_owed_evaluation_comes_behind_the_first_round(patch: Patch) -> None:
    init, trained = Barrier.__init__, Barrier.trained

    def late(
        self: Barrier, tasks: BarrierPlan, position: Position | None = None, *rest: Any, **given: Any
    ) -> None:
        init(self, tasks, position, *rest, **given)
        self._late, self._ended = self._ended, []  # type: ignore[attr-defined]

    def ready(self: Barrier) -> None:
        trained(self)
        self._ended += self._late  # type: ignore[attr-defined]
        self._late = []  # type: ignore[attr-defined]

    patch.setattr(Barrier, "__init__", late)
    patch.setattr(Barrier, "trained", ready)


@mutant("S23", Lives(100))
def a_run_ends_without_a_last_checkpoint(patch: Patch) -> None:
    patch.setattr(Barrier, "end", lambda self, global_step: False)


@mutant("S23", Lives(200))
def a_resumed_run_numbers_its_checkpoints_anew(patch: Patch) -> None:
    init = Barrier.__init__

    def anew(
        self: Barrier, tasks: BarrierPlan, position: Position | None = None, *rest: Any, **given: Any
    ) -> None:
        init(self, tasks, position, *rest, **given)
        self.versions = 0

    patch.setattr(Barrier, "__init__", anew)


@mutant("S24", Lives(300))
def patience_has_no_end(patch: Patch) -> None:
    patch.setattr(Barrier, "is_enough", False)


@mutant("S24", Lives(300))
def the_best_epoch_is_not_known(patch: Patch) -> None:
    patch.setattr(Barrier, "_is_best", property(lambda self: False, lambda self, value: None), False)


@mutant("L6", Lives(100))
def a_checkpoint_waits_for_the_end_of_the_run(patch: Patch) -> None:
    patch.setattr(Schedule, "is_due", lambda *_: False)


@mutant("L6", Lives(200))
def a_wish_is_forgotten(patch: Patch) -> None:
    patch.setattr(Barrier, "wish", lambda self, what: None)


@mutant("S25", Lives(200))
def a_checkpoint_begins_while_one_is_written(patch: Patch) -> None:
    patch.setattr(SaveBudget, "free_ms", property(lambda _: -math.inf))


@mutant("L6", Lives(400))
def a_checkpoint_that_was_put_off_never_comes(patch: Patch) -> None:
    patch.setattr(Barrier, "written", lambda *_: None)


# ---------------------------------------------------------------- the time of a run
class Timeless(Coordinator):
    """Does not know that its time is limited."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__(replace(config, max_ms=None))


@mutant("L3", 200)
def a_run_goes_on_when_its_time_is_up(_patch: Patch) -> Machines:
    return Machines(coordinator=Timeless)


PAUSED_TO_THE_END = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=100, epochs=1, policy="cadence", max_ms=50.0),
    ms_per_step=(1.0, 2.0),
    wishes=(Wish(10.0, Requested("pause")),),
)


@mutant("L1", PAUSED_TO_THE_END)
def the_end_of_its_time_is_no_deadline(patch: Patch) -> None:
    deadline_ms = Coordinator.deadline_ms

    def forgetful(self: Coordinator) -> float | None:
        end_ms, self._end_ms = self._end_ms, None
        found = deadline_ms(self)
        self._end_ms = end_ms
        return found

    patch.setattr(Coordinator, "deadline_ms", forgetful)


# ---------------------------------------------------------------- shares behind a disturbance
HICCUP = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=10, epochs=70, policy="cadence"),
    ms_per_step=(20.0, 20.0),
    disturbance=Disturbance(rank=1, step=20, factor=100.0),
)
SLOW_PHASE = replace(HICCUP, disturbance=Disturbance(rank=1, step=20, factor=100.0, for_ms=5000.0))


@mutant("L7", HICCUP)
def one_odd_step_sets_the_pace_for_ever(patch: Patch) -> None:
    patch.setattr(OutlierFilter, "confirmed", lambda self, rank, ms, steps, known_ms: ms)
    patch.setattr(Cadence, "due", ())


@mutant("L7", SLOW_PHASE)
def a_rank_without_work_is_never_probed(patch: Patch) -> None:
    patch.setattr(Cadence, "due", ())


SLOW_EXACT = replace(
    SLOW_PHASE,
    config=replace(SLOW_PHASE.config, policy="exact", global_batch=GlobalBatch(16, 160)),
    fixed=0.5,
    disturbance=Disturbance(rank=1, step=20, factor=20.0, for_ms=9000.0),
)


@mutant("L7", SLOW_EXACT)
def a_rank_that_was_left_out_is_never_probed(patch: Patch) -> None:
    patch.setattr(Exclusion, "plan", lambda self: self.out)


# ---------------------------------------------------------------- several machines
def on_machines(
    *numbers: int, inner_rounds: int = 4, overlaps: bool = False, batches: int = 400, **given: Any
) -> Scenario:
    """Machines of so many ranks each, in rounds of a few steps."""
    ranks = sum(numbers)
    return Scenario(
        seed=0,
        config=CoordinatorConfig(
            world_size=ranks,
            batches=batches,
            epochs=2,
            cadence=CadenceOptions(anchor=3),
            tasks=BarrierPlan(save=SavePlan(1, "epoch"), eval_every=1),
            machines=numbers,
            inner_rounds=inner_rounds,
            overlaps=overlaps,
        ),
        ms_per_step=tuple(1.0 + 0.5 * rank for rank in range(ranks)),
        sync_ms=0.1,
        links=Links((0.0, *(0.5 for _ in numbers[1:])), 2.0),
        **given,
    )


def a_wrong_part(plant: Callable[[PartState, Arrival], Arrival]) -> Machines:
    """A gate of a machine that tells the gate of all something else."""

    class Wrong(PartState):
        @property
        def gathered(self) -> tuple[Arrival, ...]:
            return tuple(plant(self, arrival) for arrival in super().gathered)

    return Machines(part=Wrong)


@mutant("S26", on_machines(2, 1))
def the_weights_of_all_are_those_since_the_inner_mean(_patch: Patch) -> Machines:
    return a_wrong_part(lambda _, arrival: replace(arrival, earlier=(arrival.earlier[0], 0)))


@mutant("S4", on_machines(2, 1))
def the_steps_of_inner_rounds_are_not_counted(_patch: Patch) -> Machines:
    return a_wrong_part(lambda _, arrival: replace(arrival, earlier=(0, arrival.earlier[1])))


@mutant("S26", on_machines(2, 1))
def a_part_never_counts_anew(patch: Patch) -> Machines:
    class Forever(PartState):
        def conclude(self, outcome: Outcome) -> None:
            steps, samples = self._steps, self._samples
            super().conclude(outcome)
            self._steps, self._samples = dict.fromkeys(steps, 0), samples

    return Machines(part=Forever)


BAD_MACHINE = on_machines(1, 2, inner_rounds=10, bad_steps=((1, 25), (2, 18)))


@mutant("S26", BAD_MACHINE)
def a_machine_without_a_healthy_replica_keeps_its_weight(_patch: Patch) -> Machines:
    return a_wrong_part(
        lambda part, arrival: replace(arrival, earlier=(arrival.earlier[0], part._samples[arrival.rank]))
    )


@mutant("S27", on_machines(2, 2, wishes=(Wish(60.0, Requested("set_lr", 0.1)),)))
def an_inner_outcome_takes_the_directives(_patch: Patch) -> Machines:
    """Those of all machines, told to one by itself."""

    gates: list[GateState] = []

    class Whole(GateState):
        def __init__(self, world_size: int) -> None:
            super().__init__(world_size)
            gates.append(self)

    class Greedy(PartState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            outcome = super().enter(arrival)
            return outcome and replace(outcome, lr=gates[0].directives.lr)

    return Machines(gate=Whole, part=Greedy)


@mutant("S27", on_machines(2, 2, wishes=(Wish(60.0, Requested("checkpoint")),)))
def a_hurried_inner_round_voids_for_its_machine_alone(patch: Patch) -> None:
    def voids(self: Outcome) -> bool:
        return self.stop or self.pause or self.halt or self.hurried or bool(self.left) or bool(self.bad)

    patch.setattr(Outcome, "voids", property(voids))


@mutant("S4", OnMachines(200))
def a_hurried_order_is_whole_where_its_last_round_is(patch: Patch) -> None:
    """The steps that were left out in inner rounds are forgotten at the round of all."""
    patch.setattr(WorkerMachine, "_left", lambda self, sync, planned, is_inner: 0)


@mutant("S27", on_machines(2, 2))
def a_part_decides_with_the_first_of_its_ranks(_patch: Patch) -> Machines:
    class Hasty(PartState):
        def enter(self, arrival: Arrival) -> Outcome | None:
            if not arrival.inner:
                return super().enter(arrival)
            members, self.members = self.members, {arrival.rank}
            try:
                return super().enter(arrival)
            finally:
                self.members = members

    return Machines(part=Hasty)


@mutant("S2", on_machines(2, 1))
def a_part_concludes_a_round_twice(_patch: Patch) -> Machines:
    class Twice(PartState):
        def conclude(self, outcome: Outcome) -> None:
            super().conclude(outcome)
            super().conclude(outcome)

    return Machines(part=Twice)


HURRIED_WHILE_BAD = on_machines(
    1, 2, inner_rounds=10, bad_steps=((1, 25),), wishes=(Wish(50.0, Requested("checkpoint")),)
)


@mutant("S21", HURRIED_WHILE_BAD)
def a_bad_replica_that_took_an_inner_mean_is_never_healed(patch: Patch) -> Machines:
    class Cured(WorkerMachine):
        def met(self, outcome: Outcome) -> Any:
            done = super().met(outcome)
            self.is_bad = False
            return done

    return Machines(worker=Cured)


@mutant("S21", on_machines(2, 2, bad_steps=((2, 40),)))
def a_replica_is_healed_by_another_machine(patch: Patch) -> None:
    init = Barrier.__init__

    def blind(self: Barrier, tasks: Any, position: Any = None, machine_of: Any = (), **given: Any) -> None:
        init(self, tasks, position, (), **given)

    patch.setattr(Barrier, "__init__", blind)


OVERLAPPING = on_machines(2, 1, overlaps=True)


@mutant("S28", OVERLAPPING)
def a_checkpoint_does_not_wait_for_the_mean_on_its_way(patch: Patch) -> None:
    begun = Barrier._next

    def hasty(self: Barrier, *where: Any, **given: Any) -> list[Command]:
        self._is_unsettled = False
        return begun(self, *where, **given)

    patch.setattr(Barrier, "_next", hasty)


@mutant("S28", replace(OVERLAPPING, config=replace(OVERLAPPING.config, tasks=BarrierPlan())))
def a_run_ends_with_a_mean_on_its_way(patch: Patch) -> None:
    patch.setattr(Barrier, "settle", lambda self: False)


@mutant("S28", on_machines(2, 1))
def a_mean_is_brought_in_where_none_travels(patch: Patch) -> None:
    patch.setattr(Barrier, "trained", lambda self, *_: setattr(self, "_is_unsettled", True))


LOST = on_machines(1, 2, 1, loss=Loss(1, "gate", 9, 5.0))


@mutant("L8", LOST)
def a_lost_machine_is_waited_for(_patch: Patch) -> Machines:
    class Loyal(Coordinator):
        def handle(self, fact: Fact, now_ms: float) -> list[Command]:
            return super().handle(replace(fact, ranks=()) if isinstance(fact, Failed) else fact, now_ms)

    return Machines(coordinator=Loyal)


@mutant("S3", LOST)
def a_lost_machine_is_no_failure(_patch: Patch) -> Machines:
    class Calm(Coordinator):
        def _take_failure(self, fact: Failed) -> None:
            self._gone.update(fact.ranks)

    return Machines(coordinator=Calm)


LATE_MEANS = replace(
    on_machines(1, 1, inner_rounds=10, batches=4000),
    sync_ms=0.0,
    links=Links((0.0, 0.1), 20.0),
)


@mutant("S5", replace(LATE_MEANS, config=replace(LATE_MEANS.config, cadence=CadenceOptions(anchor=10))))
def a_mean_of_all_machines_counts_in_every_round(patch: Patch) -> None:
    patch.setattr(
        HeldRounds, "sync_ms", property(lambda held: 10 * max(a.sync_ms for a in held.armed.acks.values()))
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_found(name: str, monkeypatch: Patch) -> None:
    planted = MUTANTS[name]
    found = violations(planted, monkeypatch)
    assert planted.rule in found, f"{name} survived {planted.where}, {planted.rule} was expected: {found[:9]}"


def test_every_rule_finds_a_mutant() -> None:
    """A rule that no planted bug breaks has not been shown to work."""
    expected = {f"S{number}" for number in range(1, 29)} | {f"L{number}" for number in range(1, 9)}
    assert expected <= {planted.rule for planted in MUTANTS.values()}


def test_the_failing_seed_of_the_page_fails_so(monkeypatch: Patch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/testing.md").read_text(encoding="utf-8")
    [(seed, said)] = re.findall(r"^seed (\d+): (.*)$", page, re.MULTILINE)
    [planted] = re.findall(r"with the mutant `(\w+)`", page)
    play(draw(int(seed)))
    with pytest.raises(Violation) as caught:
        play(draw(int(seed)), MUTANTS[planted].plant(monkeypatch))
    assert str(caught.value) == said


def test_a_short_timeout_that_doubles_is_no_bug(monkeypatch: Patch) -> None:
    """The control of the mutant: from the same short timeout, doubling reaches what is needed."""
    monkeypatch.setattr("flowdp.machine.async_rounds.SNAPSHOT_TIMEOUT_MS", 2.0)
    JudgedWorld(SLOW_LINKS).run()
    for seed in range(100):
        JudgedWorld(draw(seed)).run()
