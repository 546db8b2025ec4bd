"""Planted bugs, to test the rules: each must be found within the first seeds, by the rule it breaks.

A mutant that survives means that a rule or a kind of trouble is missing.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flowdp.machine import epochs, exact_rounds
from flowdp.machine.armed_rounds import ArmedRounds, HeldRounds
from flowdp.machine.async_rounds import AsyncRounds
from flowdp.machine.barrier import Barrier
from flowdp.machine.config import BarrierPlan, CoordinatorConfig, GlobalBatch
from flowdp.machine.coordinator import Coordinator, Phase
from flowdp.machine.epochs import Epochs
from flowdp.machine.exact_rounds import ExactRounds
from flowdp.machine.planned_rounds import PlannedRounds
from flowdp.machine.worker import Action, WorkerMachine
from flowdp.options import CadenceOptions
from flowdp.policy.cadence import Cadence
from flowdp.policy.interval import Interval, SaveBudget, Schedule
from flowdp.policy.ledger import ENDLESS, Ledger
from flowdp.policy.recovery import OutlierFilter
from flowdp.policy.shares import part_sizes
from flowdp.policy.sharing import Exclusion
from flowdp.policy.streams_ledger import StreamsLedger
from flowdp.policy.tally import EpochMetrics, Work
from flowdp.protocol.commands import (
    AbortGate,
    Command,
    EpochStarted,
    EvaluationEnded,
    Finish,
    Send,
)
from flowdp.protocol.gate import GateState, PartState
from flowdp.protocol.messages import (
    Arrival,
    BarrierTask,
    DataEnded,
    Exiting,
    Fact,
    Failed,
    Leave,
    Order,
    Outcome,
    Requested,
    SnapshotReady,
    SyncAck,
    SyncNow,
    Throttle,
    Tick,
    Update,
)
from flowdp.protocol.position import Position
from tests import invariants
from tests.simulator.cluster import JudgedWorld, Machines
from tests.simulator.effect import Effect
from tests.simulator.faults import Disturbance, Scenario, draw
from tests.simulator.lives import play
from tests.simulator.machines import Links
from tests.simulator.rank import FaultyRank
from tests.simulator.rules import Violation
from tests.simulator.scenario import Loss, Wish

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], Machines | None]


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


# ---------------------------------------------------------------- ways to plant a bug
def instead(owner: type, name: str, value: Any) -> Plant:
    """Another attribute of a class."""
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def around(owner: type, name: str, advice: Callable[..., Any]) -> Plant:
    """A method or property that calls `advice(original, self, *arguments)`."""

    def plant(patch: Patch) -> None:
        original = inspect.getattr_static(owner, name)
        if isinstance(original, property):
            patch.setattr(owner, name, property(lambda self: advice(original.fget, self)))
            return

        def method(self: Any, *given: Any, **named: Any) -> Any:
            return advice(original, self, *given, **named)

        patch.setattr(owner, name, method)

    return plant


def all_of(*plants: Plant) -> Plant:
    def plant(patch: Patch) -> None:
        for one in plants:
            one(patch)

    return plant


def during(owner: type, name: str, field: str, value: Callable[[Any], Any] | None = None) -> Plant:
    """A field has another value in the calls of a method, and its own after them. None: the same value."""

    def advice(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        before = getattr(self, field)
        if value is not None:
            setattr(self, field, value(self))
        try:
            return original(self, *given, **named)
        finally:
            setattr(self, field, before)

    return around(owner, name, advice)


def behind(owner: type, name: str, field: str, value: Any) -> Plant:
    """A field has this value after each call of a method."""

    def advice(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        answer = original(self, *given, **named)
        setattr(self, field, value)
        return answer

    return around(owner, name, advice)


def deaf(order: type[Order]) -> Plant:
    """A worker does not hear one kind of order."""
    return around(
        WorkerMachine,
        "handle",
        lambda handle, self, told: None if isinstance(told, order) else handle(self, told),
    )


def unsent(order: type[Order]) -> Plant:
    """The coordinator does not send one kind of order."""
    return unsaid(lambda command: isinstance(command, Send) and isinstance(command.order, order))


def unsaid(is_lost: Callable[[Command], bool]) -> Plant:
    """The coordinator does not give some commands."""
    return around(
        Coordinator,
        "handle",
        lambda handle, self, fact, now_ms: [c for c in handle(self, fact, now_ms) if not is_lost(c)],
    )


def coordinator_hears(change: Callable[[Coordinator, Any], Fact]) -> Plant:
    return around(
        Coordinator, "handle", lambda handle, self, fact, now_ms: handle(self, change(self, fact), now_ms)
    )


def gate_hears(change: Callable[[Arrival], Arrival]) -> Plant:
    """The gate of all ranks hears other arrivals."""
    return around(
        GateState,
        "enter",
        lambda enter, self, arrival: enter(self, change(arrival) if type(self) is GateState else arrival),
    )


def part_tells(change: Callable[[PartState, Arrival], Arrival]) -> Plant:
    """The gate of a machine tells that of all something else."""
    return around(
        PartState, "gathered", lambda gathered, self: tuple(change(self, one) for one in gathered(self))
    )


def fixed(value: Any) -> property:
    """An attribute that nothing changes."""
    return property(lambda self: value, lambda self, other: None)


class StopByInbox(Coordinator):
    """Tells every rank to leave by its inbox, and hears nothing but their leaving from then on."""

    told = False

    def _take(self, fact: Fact, now_ms: float) -> list[Command]:
        if self.told:
            return [] if not isinstance(fact, Exiting) else super()._take(fact, now_ms)
        if isinstance(fact, Requested) and fact.what == "stop" and self.phase is Phase.RUNNING:
            self.told = True
            return [Send(rank, Leave()) for rank in self._present()]
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


class MeetAndLeave(WorkerMachine):
    """Reads a stop as: enter the gate with what there is, average, leave."""

    stops = False

    def handle(self, order: Order) -> None:
        if order == Leave() and self.order is not None and self.order.sync is not None:
            self.stops = True
            self._sync_now = 2**61
        else:
            super().handle(order)

    def met(self, outcome: Outcome) -> Any:
        done = super().met(outcome)
        if self.stops:
            self._leave = Leave()
        return done


class FinishAndLeave(WorkerMachine):
    """Reads a stop as: do what is armed, then leave."""

    stops = False

    def handle(self, order: Order) -> None:
        if order == Leave():
            self.stops = True
        else:
            super().handle(order)

    def next(self, *, in_step: bool = False) -> Action:
        if self.stops and self.order is None:
            return Leave()
        return super().next(in_step=in_step)


class LeavingWorld(JudgedWorld):
    """A rank that ends takes itself out of the gate, so that nobody waits for it."""

    def leave(self, number: int, error: str | None = None, *, is_alone: bool = False) -> None:
        super().leave(number, error, is_alone=is_alone)
        self.leave_gate(number)


# ---------------------------------------------------------------- bugs of several lines
def tells_of_a_failure(command: Command) -> bool:
    """Whether a command frees ranks after a failure."""
    is_order = isinstance(command, Send) and isinstance(command.order, Leave) and command.order != Leave()
    return is_order or isinstance(command, AbortGate)


def ended_as_complete(
    _: Any, self: Epochs, now_ms: float, anchor: int, global_step: int, **given: Any
) -> list[EpochMetrics]:
    records = []
    for epoch in list(self._open):
        if epoch.ledger.is_complete:
            self._open.remove(epoch)
            self.done += 1
            records.append(epoch.tally.result(1.0, anchor, global_step, self.config.epochs))
    return records


def mindful(take: Any, self: AsyncRounds, fact: Fact, now_ms: float) -> Any:
    self._is_bad |= isinstance(fact, SnapshotReady) and fact.bad
    return take(self, fact, now_ms)


def owes_later(init: Any, self: Any, config: CoordinatorConfig) -> None:
    init(self, config)
    self._late, self._ended = self._ended, []


def owes_now(trained: Any, self: Any) -> None:
    trained(self)
    self._ended += self._late
    self._late = []


def greedy_parts(_patch: Patch) -> Machines:
    """An inner outcome takes the directives of all machines, told to one by itself."""
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


def voids(self: Outcome) -> bool:
    """Also where the round is hurried."""
    return self.stop or self.pause or self.halt or self.hurried or bool(self.left) or bool(self.bad)


# ---------------------------------------------------------------- scenarios in which a bug is cheap to find
STOPPED = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=2000, epochs=1, cadence=CadenceOptions(anchor=30)),
    ms_per_step=(1.0, 2.0),
    wishes=(Wish(200.0, Requested("stop")),),
)
SHORT_LAST_ROUNDS = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=61, epochs=4, policy="cadence"),
    ms_per_step=(20.0, 20.0),
    sync_ms=4.0,
)
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
LATE_AND_BAD = Scenario(
    seed=0,
    config=CoordinatorConfig(
        world_size=2,
        batches=20,
        epochs=4,
        policy="async",
        cadence=CadenceOptions(anchor=2),
        tasks=BarrierPlan(evaluation=Interval(1, "epoch")),
    ),
    ms_per_step=(1.0, 1.0),
    late_snapshot=1.0,
    bad_steps=((0, 7),),
    eval_batches=4,
    eval_ms=4000.0,
)
LATE_AND_CALLED = Scenario(
    seed=0,
    config=CoordinatorConfig(
        world_size=2, batches=2000, epochs=1, policy="async", cadence=CadenceOptions(anchor=2)
    ),
    ms_per_step=(1.0, 4.0),
    noise=0.3,
    late_snapshot=1.0,
    wishes=tuple(Wish(at_ms, Requested("set_lr", 0.1)) for at_ms in (20.0, 60.0, 100.0)),
)
PAUSED_TO_THE_END = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=100, epochs=1, policy="cadence", max_ms=50.0),
    ms_per_step=(1.0, 2.0),
    wishes=(Wish(10.0, Requested("pause")),),
)
HICCUP = Scenario(
    seed=0,
    config=CoordinatorConfig(world_size=2, batches=10, epochs=70, policy="cadence"),
    ms_per_step=(20.0, 20.0),
    disturbance=Disturbance(rank=1, step=20, factor=100.0),
)
SLOW_PHASE = replace(HICCUP, disturbance=Disturbance(rank=1, step=20, factor=100.0, for_ms=5000.0))
SLOW_EXACT = replace(
    SLOW_PHASE,
    config=replace(SLOW_PHASE.config, policy="exact", global_batch=GlobalBatch(16, 160)),
    fixed=0.5,
    disturbance=Disturbance(rank=1, step=20, factor=20.0, for_ms=9000.0),
)


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
            tasks=BarrierPlan(save=Interval(1, "epoch"), evaluation=Interval(1, "epoch")),
            machines=numbers,
            inner_rounds=inner_rounds,
            overlaps=overlaps,
        ),
        ms_per_step=tuple(1.0 + 0.5 * rank for rank in range(ranks)),
        sync_ms=0.1,
        links=Links((0.0, *(0.5 for _ in numbers[1:])), 2.0),
        **given,
    )


BAD_MACHINE = on_machines(1, 2, inner_rounds=10, bad_steps=((1, 25), (2, 18)))
HURRIED_WHILE_BAD = on_machines(
    1, 2, inner_rounds=10, bad_steps=((1, 25),), wishes=(Wish(50.0, Requested("checkpoint")),)
)
OVERLAPPING = on_machines(2, 1, overlaps=True)
LOST = on_machines(1, 2, 1, loss=Loss(1, "gate", 9, 5.0))
LATE_MEANS = on_machines(1, 1, inner_rounds=10, batches=4000)
LATE_MEANS = replace(
    LATE_MEANS,
    sync_ms=0.0,
    links=Links((0.0, 0.1), 20.0),
    config=replace(LATE_MEANS.config, cadence=CadenceOptions(anchor=10)),
)


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, rule: str, where: Where, plant: Plant, world: type[JudgedWorld] = JudgedWorld) -> None:
    MUTANTS[name] = Mutant(rule, where, plant, world)


def advice(
    rule: str, where: Where, owner: Any, name: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A mutant whose bug is around a method: `bug(original, self, *arguments)` is called instead of it."""

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        mutant(bug.__name__, rule, where, around(owner, name, bug))
        return bug

    return register


# ---------------------------------------------------------------- three wrong readings of a stop
mutant("a_stop_is_obeyed_where_it_is_read", "L3", 100, lambda _: Machines(coordinator=StopByInbox))

mutant(
    "a_stop_means_average_and_leave",
    "L3",
    100,
    lambda _: Machines(coordinator=StopByInbox, worker=MeetAndLeave),
)

mutant(
    "a_stop_is_obeyed_after_what_is_armed",
    "S11",
    100,
    lambda _: Machines(coordinator=StopByInbox, worker=FinishAndLeave),
    LeavingWorld,
)


# ---------------------------------------------------------------- rounds
@advice("S4", 20, PlannedRounds, "take")
def a_phantom_step_for_each_acknowledgment(take, self, fact, now_ms):
    commands = take(self, fact, now_ms)
    self.global_step += isinstance(fact, SyncAck)
    return commands


mutant("peers_are_not_told_of_a_failure", "L2", 100, unsaid(tells_of_a_failure))


@advice("S2", 300, PlannedRounds, "take")
def answers_come_in_the_order_of_rounds(take, self, fact, now_ms):
    first = self._armed[0]
    armed, self._armed = self._armed, type(self._armed)([first])
    try:
        return take(self, fact, now_ms)
    finally:
        self._armed = armed if self._armed else type(armed)(list(armed)[1:])


mutant("a_hurried_round_voids_nothing", "S4", 1000, gate_hears(lambda one: replace(one, left=0)))

mutant("a_call_to_the_gate_is_lost", "L3", STOPPED, deaf(SyncNow))


@advice("L1", 100, WorkerMachine, "handle")
def a_call_to_the_gate_has_no_end(handle, self, order):
    return handle(self, SyncNow(2**61) if isinstance(order, SyncNow) else order)


@advice("S2", 100, WorkerMachine, "met")
def a_worker_keeps_orders_of_void_plans(met, self, outcome):
    orders = list(self._orders)
    done = met(self, outcome)
    self._oldest_plan = 0
    self._orders.extend(orders if not self._orders else ())
    return done


@advice("S2", 50, WorkerMachine, "next")
def an_idle_rank_counts_from_its_own_mean(next, self, *, in_step=False):
    action = next(self, in_step=in_step)
    if isinstance(action, Arrival) and action.steps == 0:
        return replace(action, global_step=self.total_steps)
    return action


@advice("S2", 20, WorkerMachine, "trained")
def the_planned_samples_are_the_weights(trained, self, _):
    return trained(self, 8)


mutant(
    "a_stop_waits_for_the_end_of_the_data",
    "L3",
    300,
    all_of(
        around(
            PlannedRounds,
            "decide",
            lambda decide, self, now_ms, hold, meet: decide(self, now_ms, meet=meet),
        ),
        instead(GateState, "direct", lambda self, directives: None),
    ),
)


# ---------------------------------------------------------------- the ledger and the epochs
@advice("S1", 20, Ledger, "deal")
def a_batch_is_dealt_twice(deal, self, *asked):
    return tuple((*hand[:-1], hand[0]) if len(hand) > 1 else hand for hand in deal(self, *asked))


@advice("S7", 100, Ledger, "count_back")
def left_overs_are_lost(count_back, self, rank, batches, _):
    return count_back(self, rank, batches, len(batches))


mutant(
    "epochs_are_reported_as_they_complete",
    "S7",
    300,
    all_of(
        around(Epochs, "ended", ended_as_complete),
        instead(invariants, "_check_epochs", lambda epochs: None),
        instead(
            Epochs, "_is_open", lambda self, number: any(one.ledger.epoch == number for one in self._open)
        ),
    ),
)


@advice("S7", 300, Epochs, "ended")
def the_last_epoch_does_not_wait_for_its_rounds(ended, self, *now, is_idle):
    return ended(self, *now)


@advice("S5", 50, Cadence, "_fit")
def a_slow_rank_gets_no_quota(fit, self):
    fit(self)
    fair = self.quotas
    self.quotas = fair if len(set(fair)) == 1 else tuple(0 if q == min(fair) else q for q in fair)


mutant("a_short_round_stretches_all_others", "S5", SHORT_LAST_ROUNDS, instead(Cadence, "round_ms", 0.0))

mutant(
    "a_lead_has_no_limit",
    "S6",
    1000,
    during(Cadence, "_fit", "options", lambda self: replace(self.options, max_batch_diff=None)),
)

# ---------------------------------------------------------------- epochs of unknown length
mutant("the_end_of_the_data_is_not_passed_on", "L5", 100, unsent(DataEnded))

mutant("a_worker_waits_for_what_never_existed", "L5", 100, deaf(DataEnded))

mutant(
    "the_end_of_the_data_is_forgotten_before_the_run_begins",
    "S14",
    500,
    coordinator_hears(
        lambda self, fact: Tick() if isinstance(fact, DataEnded) and self.phase is Phase.STARTING else fact
    ),
)


@advice("S14", 100, Ledger, "end")
def one_batch_too_many_is_dealt(end, self, batches, *machine):
    return end(self, batches + 1, *machine)


mutant("max_steps_counts_what_never_existed", "S1", 500, during(Epochs, "end", "_planned"))


@advice("S2", STREAMS, StreamsLedger, "end")
def the_end_of_one_stream_is_taken_for_that_of_another(end, self, batches, machine):
    return end(self, batches, 1 - machine)


@advice("S14", STREAMS, Coordinator, "handle")
def the_end_of_the_other_streams_is_not_heard(handle, self, fact, now_ms):
    return [] if isinstance(fact, DataEnded) and fact.machine > 0 else handle(self, fact, now_ms)


@advice("S7", STREAMS, StreamsLedger, "remaining")
def an_epoch_is_over_with_the_first_stream_that_ends(_, self):
    return 0 if any(part.remaining == 0 for part in self._parts) else ENDLESS


@advice("L5", STREAMS, StreamsLedger, "deal")
def batches_of_one_stream_are_dealt_to_all_machines(deal, self, *given):
    return tuple(reversed(deal(self, *given)))


# ---------------------------------------------------------------- windows and steps of several batches
@advice("S15", 200, ExactRounds, "_parts")
def the_last_window_is_taken_for_a_whole_one(parts, self, *given):
    self._batch = replace(self._batch, samples=10**9)
    return parts(self, *given)


@advice("S16", 300, ExactRounds, "_parts")
def all_ranks_train_the_windows_of_one_alone(parts, self, windows, _):
    return parts(self, windows, self.ratios)


@advice("S1", 500, ExactRounds, "_count_back")
def the_windows_of_one_rank_count_as_one(_, self, held):
    return self.epochs.count_back(held.armed.epoch, 0, held.armed.dealt.hands[0], held.rounds)


@advice("S15", 200, ExactRounds, "_order")
def ranks_are_told_of_different_splits(order, self, block, rank):
    shares = [1.0 + (other == rank) for other in range(self.world_size)]
    sizes = self._sizes(self.epochs.of(block.epoch), block.dealt.hands[0])
    block.dealt.parts = list(zip(*self._parts(sizes, shares), strict=True))
    return order(self, block, rank)


mutant(
    "a_rank_may_get_one_sample_whatever_the_model_needs",
    "S15",
    400,
    instead(exact_rounds, "part_sizes", lambda samples, ratios, _: part_sizes(samples, ratios)),
)

mutant(
    "every_part_counts_as_a_step_of_the_run", "S16", 100, gate_hears(lambda one: replace(one, window=None))
)


@advice("S16", 100, WorkerMachine, "_step")
def a_rank_stands_a_step_ahead_in_the_schedule(step, self, under_way, position):
    return step(self, under_way, position + (under_way.order.parts is not None and self.rank == 1))


mutant(
    "nobody_compares",
    "S17",
    100,
    gate_hears(lambda one: replace(one, window=one.window and replace(one.window, compare=False))),
)

mutant("replicas_that_differ_go_on", "S17", 1000, instead(exact_rounds, "_different", lambda acks: []))


@advice("S1", 200, ExactRounds, "_count_back")
def windows_are_never_counted_back(count_back, self, held):
    count_back(self, replace(held, outcome=replace(held.outcome, round=held.armed.sync.round - 1)))


mutant(
    "a_step_is_counted_back_as_one_batch",
    "S1",
    200,
    during(Ledger, "count_back", "groups", lambda self: (1,) * len(self.groups)),
)


# ---------------------------------------------------------------- snapshots
@advice("S8", LATE_AND_CALLED, AsyncRounds, "take")
def a_late_answer_counts_for_the_next_round(take, self, fact, now_ms):
    if isinstance(fact, SnapshotReady) and self._round is not None:
        fact = replace(fact, round=self._round.number)
    return take(self, fact, now_ms)


mutant("the_end_of_the_data_is_not_noticed", "L1", 50, instead(Epochs, "is_exhausted", False))

mutant(
    "the_run_ends_without_a_last_mean",
    "S9",
    50,
    all_of(
        instead(AsyncRounds, "_is_dirty", False),
        instead(Coordinator, "_position", lambda self, now_ms: Position(1)),
    ),
)


@advice("S4", 500, AsyncRounds, "_give_up")
def steps_of_a_round_that_was_given_up_count_twice(give_up, self):
    self.global_step += sum(snapshot.steps for snapshot in self._round.snapshots.values())
    give_up(self)


mutant("a_throttle_is_lost", "S6", 100, unsent(Throttle))


@advice("S6", 100, AsyncRounds, "_deal")
def a_throttle_comes_behind_its_orders(deal, self, now_ms):
    return sorted(deal(self, now_ms), key=lambda c: isinstance(c, Send) and isinstance(c.order, Throttle))


mutant("a_rank_goes_on_beyond_its_throttle", "S6", 100, deaf(Throttle))


def lead_limits_as_if(limits, self, **fields):
    """The limits of ranks with other fields, which come back."""
    kept = self._ranks
    self._ranks = [replace(state, **{name: value(state) for name, value in fields.items()}) for state in kept]
    try:
        return limits(self)
    finally:
        self._ranks = kept


@advice("S6", 200, AsyncRounds, "_limits")
def a_lead_counts_from_the_last_snapshot(limits, self):
    return lead_limits_as_if(limits, self, mean=lambda state: state.snapshot, has_mean=lambda state: True)


@advice("S6", 500, AsyncRounds, "_limits")
def a_mean_that_was_sent_is_taken_for_applied(limits, self):
    return lead_limits_as_if(limits, self, has_mean=lambda state: True)


@advice("L1", 100, WorkerMachine, "handle")
def a_throttled_rank_is_never_released(handle, self, order):
    if isinstance(order, Throttle) and self._throttle is not None:
        order = replace(order, limit=min(order.limit, self._throttle.limit))
    handle(self, order)


@advice("S13", 50, WorkerMachine, "_serve")
def a_worker_forgets_where_the_mean_stands(serve, self, order):
    return serve(self, replace(order, global_step=0) if isinstance(order, Update) else order)


# ---------------------------------------------------------------- wishes
mutant("directives_are_not_consumed", "S12", 300, during(GateState, "_complete", "directives"))


@advice("S12", 300, Coordinator, "handle")
def a_learning_rate_is_told_with_every_wish(handle, self, fact, now_ms):
    if isinstance(fact, Requested):
        self.lr = (fact,) if fact.what in ("set_lr", "scale_lr") else getattr(self, "lr", ())
        self._new_lr = self.lr
    return handle(self, fact, now_ms)


@advice("L4", 300, GateState, "direct")
def a_learning_rate_is_forgotten(direct, self, directives):
    return direct(self, replace(directives, lr=()))


@advice("S29", 100, Coordinator, "_run")
def an_epoch_is_told_behind_its_orders(run, self, now_ms):
    return sorted(run(self, now_ms), key=lambda command: isinstance(command, EpochStarted))


@advice("S10", 100, Coordinator, "_run")
def a_pause_does_not_wait_for_the_ranks(run, self, now_ms):
    if self._wants_pause and not self.is_paused:
        return self._stand_still()
    return run(self, now_ms)


mutant(
    "orders_go_to_ranks_that_left",
    "S3",
    300,
    instead(Coordinator, "_present", lambda self: list(range(self.config.world_size))),
)


# ---------------------------------------------------------------- standstills
@advice("S18", Lives(100), Coordinator, "_run")
def a_barrier_task_does_not_wait_for_the_ranks(run, self, now_ms):
    if self.barrier.is_wanted and not self.rounds.is_idle:
        return self._stand(now_ms)
    return run(self, now_ms)


@advice("S18", Lives(100), Barrier, "is_wanted")
def training_goes_on_while_a_barrier_task_is_out(is_wanted, self):
    return self._asked is None and is_wanted(self)


@advice("S19", Lives(200), Epochs, "position")
def a_position_forgets_the_left_overs(position, self, now_ms):
    done, planned, open_ = position(self, now_ms)
    return done, planned, tuple(replace(one, left=((),) * self.config.world_size) for one in open_)


mutant(
    "a_cut_epoch_is_saved_as_a_whole_one",
    "S19",
    Lives(200),
    during(Epochs, "position", "_cut", lambda self: []),
)

mutant("a_cut_epoch_is_told_as_a_whole_one", "S7", Lives(200), instead(epochs._Open, "is_cut", False))

mutant(
    "what_was_trained_before_a_resume_is_dealt_again",
    "S1",
    Lives(100),
    instead(Ledger, "resume", lambda self, position, left: None),
)


@advice("S7", Lives(500), Ledger, "resume")
def left_overs_do_not_survive_a_resume(resume, self, position, left):
    return resume(self, position, [() for _ in left])


mutant(
    "a_resumed_run_counts_its_steps_anew",
    "S4",
    Lives(100),
    all_of(
        instead(PlannedRounds, "resume", lambda self, position: None),
        instead(AsyncRounds, "resume", lambda self, position: None),
    ),
)


@advice("S7", Lives(100), Epochs, "resume")
def the_sums_of_an_epoch_do_not_survive_a_resume(resume, self, position):
    empty = tuple(replace(one, sums=tuple(Work(one.epoch, 0, 0) for _ in one.sums)) for one in position.open)
    resume(self, replace(position, open=empty))


mutant(
    "a_resumed_run_reports_from_its_beginning",
    "S7",
    Lives(300),
    all_of(
        around(
            Epochs, "resume", lambda resume, self, position: resume(self, replace(position, done=0, open=()))
        ),
        instead(Effect, "is_trained", lambda self, epoch, batch: None),
    ),
)


@advice("S13", Lives(300), WorkerMachine, "__init__")
def a_worker_of_a_resumed_run_stands_at_its_beginning(init, self, rank, global_step=0):
    return init(self, rank)


@advice("S20", Lives(500), Ledger, "count_back")
def what_a_lost_rank_did_since_the_mean_counts(count_back, self, rank, batches, steps):
    return count_back(self, rank, batches, steps or self.steps(rank, batches))


mutant(
    "one_failure_ends_the_run_of_all",
    "S20",
    Lives(100),
    instead(Coordinator, "_may_go_on", lambda self: False),
)


@advice("S4", Lives(500), ArmedRounds, "_work")
def what_a_lost_rank_did_before_the_mean_is_forgotten(work, self, rank, outcome, unreported_samples):
    done = work(self, rank, outcome, unreported_samples)
    return done if rank in self.acks else replace(done, steps=0)


mutant(
    "a_lost_rank_says_nothing_of_its_samples",
    "S7",
    Lives(300),
    behind(WorkerMachine, "met", "unreported_samples", 0),
)

mutant(
    "a_bad_replica_weighs_what_it_trained", "S21", Lives(100), gate_hears(lambda one: replace(one, bad=False))
)


@advice("S21", Lives(500), FaultyRank, "read")
def no_gate_hears_of_a_late_verdict(read, self):
    is_bad = self.machine.is_bad
    read(self)
    self.machine.is_bad = is_bad


mutant(
    "no_acknowledgment_tells_a_late_verdict",
    "S21",
    Lives(500),
    instead(HeldRounds, "bad", property(lambda self: dict.fromkeys(self.outcome.bad))),
)


@advice("S21", Lives(500), WorkerMachine, "next")
def a_healed_replica_says_that_it_was_bad(next, self, *, in_step=False):
    is_bad = self.is_bad
    action = next(self, in_step=in_step)
    if isinstance(action, BarrierTask):
        self.is_bad = is_bad
    return action


mutant("nobody_heals", "S21", Lives(100), instead(Barrier, "bad", fixed({})))

mutant("a_bad_snapshot_is_averaged", "S21", Lives(500), instead(AsyncRounds, "_is_bad", fixed(False)))

mutant(
    "a_bad_snapshot_of_a_round_that_was_given_up_is_never_forgotten",
    "L1",
    LATE_AND_BAD,
    all_of(
        around(AsyncRounds, "take", mindful),
        instead(AsyncRounds, "wants_meeting", property(lambda self: self._is_bad)),
    ),
)

mutant(
    "an_epoch_is_reported_before_its_evaluation",
    "S22",
    Lives(100),
    instead(Barrier, "ended", lambda self, metrics: [metrics]),
)


@advice("S22", Lives(500), Barrier, "_finish")
def an_evaluation_by_steps_comes_again(finish, self, *given):
    commands = finish(self, *given)
    self.evaluations.is_wanted |= any(isinstance(command, EvaluationEnded) for command in commands)
    return commands


@advice("L6", Lives(500), Barrier, "look")
def an_evaluation_by_steps_is_forgotten(_, self, now_ms, global_step):
    self.saves.look(now_ms, global_step)
    return []


@advice("S22", Lives(500), Barrier, "decide")
def a_stop_waits_for_the_evaluation(decide, self, now_ms, present, stand, leaves):
    return decide(self, now_ms, present, stand, leaves=False)


@advice("S22", Lives(500), Position, "__init__")
def a_position_forgets_the_evaluation_that_a_stop_has_taken(init, self, *given, **named):
    return init(self, *given, **{**named, "owed_epoch": None, "owed_step": False})


@advice("S22", Lives(1000), Barrier, "__init__")
def a_resumed_run_owes_no_evaluation(init, self, config):
    start = config.start and replace(config.start, owed_epoch=None, owed_step=False)
    init(self, replace(config, start=start))


mutant(
    "an_owed_evaluation_comes_behind_the_first_round",
    "S22",
    Lives(1000),
    all_of(around(Barrier, "__init__", owes_later), around(Barrier, "trained", owes_now)),
)

mutant(
    "a_run_ends_without_a_last_checkpoint",
    "S23",
    Lives(100),
    instead(Barrier, "end", lambda self, global_step: False),
)

mutant(
    "a_resumed_run_numbers_its_checkpoints_anew",
    "S23",
    Lives(200),
    behind(Barrier, "__init__", "versions", 0),
)

mutant("patience_has_no_end", "S24", Lives(300), instead(Barrier, "is_enough", False))

mutant("the_best_epoch_is_not_known", "S24", Lives(300), instead(Barrier, "_is_best", fixed(False)))

mutant(
    "a_checkpoint_waits_for_the_end_of_the_run",
    "L6",
    Lives(100),
    instead(Schedule, "look", lambda *_: None),
)

mutant("a_wish_is_forgotten", "L6", Lives(200), instead(Barrier, "wish_snapshot", lambda self: None))

mutant(
    "a_checkpoint_begins_while_one_is_written",
    "S25",
    Lives(200),
    instead(SaveBudget, "free_ms", fixed(-math.inf)),
)

mutant(
    "a_checkpoint_that_was_put_off_never_comes",
    "L6",
    Lives(400),
    instead(Barrier, "written", lambda *_: None),
)


# ---------------------------------------------------------------- the time of a run
@advice("L3", 200, Coordinator, "__init__")
def a_run_goes_on_when_its_time_is_up(init, self, config):
    return init(self, replace(config, max_ms=None))


mutant(
    "the_end_of_its_time_is_no_deadline",
    "L1",
    PAUSED_TO_THE_END,
    during(Coordinator, "deadline_ms", "_end_ms", lambda self: None),
)

# ---------------------------------------------------------------- shares behind a disturbance
mutant(
    "one_odd_step_sets_the_pace_for_ever",
    "L7",
    HICCUP,
    all_of(
        instead(OutlierFilter, "confirmed", lambda self, rank, ms, steps, known_ms: ms),
        instead(Cadence, "due", ()),
    ),
)

mutant("a_rank_without_work_is_never_probed", "L7", SLOW_PHASE, instead(Cadence, "due", ()))

mutant(
    "a_rank_that_was_left_out_is_never_probed",
    "L7",
    SLOW_EXACT,
    instead(Exclusion, "plan", lambda self: self.out),
)

# ---------------------------------------------------------------- several machines
mutant(
    "the_weights_of_all_are_those_since_the_inner_mean",
    "S26",
    on_machines(2, 1),
    part_tells(lambda _, one: replace(one, earlier=(one.earlier[0], 0))),
)

mutant(
    "the_steps_of_inner_rounds_are_not_counted",
    "S4",
    on_machines(2, 1),
    part_tells(lambda _, one: replace(one, earlier=(0, one.earlier[1]))),
)


@advice("S26", on_machines(2, 1), PartState, "conclude")
def a_part_never_counts_anew(conclude, self, outcome):
    steps, samples = self._steps, self._samples
    conclude(self, outcome)
    self._steps, self._samples = dict.fromkeys(steps, 0), samples


mutant(
    "a_machine_without_a_healthy_replica_keeps_its_weight",
    "S26",
    BAD_MACHINE,
    part_tells(lambda part, one: replace(one, earlier=(one.earlier[0], part._samples[one.rank]))),
)

mutant(
    "an_inner_outcome_takes_the_directives",
    "S27",
    on_machines(2, 2, wishes=(Wish(60.0, Requested("set_lr", 0.1)),)),
    greedy_parts,
)

mutant(
    "a_hurried_inner_round_voids_for_its_machine_alone",
    "S27",
    on_machines(2, 2, wishes=(Wish(60.0, Requested("checkpoint")),)),
    instead(Outcome, "voids", property(voids)),
)

# The steps that were left out in inner rounds are forgotten at the round of all.
mutant(
    "a_hurried_order_is_whole_where_its_last_round_is",
    "S4",
    OnMachines(200),
    instead(WorkerMachine, "_left", lambda self, under_way, sync, planned, is_inner: 0),
)


@advice("S27", on_machines(2, 2), GateState, "enter")
def a_part_decides_with_the_first_of_its_ranks(enter, self, arrival):
    if not isinstance(self, PartState) or not arrival.inner:
        return enter(self, arrival)
    members, self.members = self.members, {arrival.rank}
    try:
        return enter(self, arrival)
    finally:
        self.members = members


@advice("S2", on_machines(2, 1), PartState, "conclude")
def a_part_concludes_a_round_twice(conclude, self, outcome):
    conclude(self, outcome)
    conclude(self, outcome)


mutant(
    "a_bad_replica_that_took_an_inner_mean_is_never_healed",
    "S21",
    HURRIED_WHILE_BAD,
    behind(WorkerMachine, "met", "is_bad", False),
)


@advice("S21", on_machines(2, 2, bad_steps=((2, 40),)), Barrier, "__init__")
def a_replica_is_healed_by_another_machine(init, self, config):
    init(self, replace(config, machines=()))


@advice("S28", OVERLAPPING, Barrier, "_next")
def a_checkpoint_does_not_wait_for_the_mean_on_its_way(begun, self, *where, **given):
    self._is_unsettled = False
    return begun(self, *where, **given)


mutant(
    "a_run_ends_with_a_mean_on_its_way",
    "S28",
    replace(OVERLAPPING, config=replace(OVERLAPPING.config, tasks=BarrierPlan())),
    instead(Barrier, "settle", lambda self: False),
)

mutant(
    "a_mean_is_brought_in_where_none_travels",
    "S28",
    on_machines(2, 1),
    behind(Barrier, "trained", "_is_unsettled", True),
)

mutant(
    "a_lost_machine_is_waited_for",
    "L8",
    LOST,
    coordinator_hears(lambda _, fact: replace(fact, ranks=()) if isinstance(fact, Failed) else fact),
)

mutant(
    "a_lost_machine_is_no_failure",
    "S3",
    LOST,
    instead(Coordinator, "_take_failure", lambda self, fact: self._gone.update(fact.ranks)),
)

mutant(
    "a_mean_of_all_machines_counts_in_every_round",
    "S5",
    LATE_MEANS,
    instead(
        HeldRounds,
        "sync_ms",
        property(lambda held: 10 * max(ack.sync_ms for ack in held.armed.acks.values())),
    ),
)


# ---------------------------------------------------------------- the tests
FOUND: dict[str, int] = json.loads((Path(__file__).parent / "corpus/mutants.json").read_text())


def scenarios(name: str) -> Iterator[Scenario]:
    """Where a mutant is looked for, at first with the seed that found it before."""
    where = MUTANTS[name].where
    if isinstance(where, Scenario):
        yield where
        return
    if name in FOUND:
        yield draw(FOUND[name])
    yield from map(draw, range(where) if isinstance(where, int) else where.seeds())


def violations(name: str, patch: Patch) -> list[str]:
    """The rules that broke, run by run, until the expected one did."""
    planted = MUTANTS[name]
    machines = planted.plant(patch)
    found: list[str] = []
    for scenario in scenarios(name):
        try:
            play(scenario, machines, world=planted.world)
        except Violation as violation:
            found.append(violation.rule)
            if violation.rule == planted.rule:
                break
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_found(name: str, monkeypatch: Patch) -> None:
    planted = MUTANTS[name]
    found = violations(name, monkeypatch)
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
