"""Each rule, broken by hand; the mutants show that they bite in whole runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import Done, Step
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.tally import Tally, Work
from flowdp.protocol.commands import EpochEnded, Finish, Paused, RoundEnded
from flowdp.protocol.messages import (
    DataEnded,
    Exiting,
    Outcome,
    Pace,
    Requested,
    Shutdown,
    StartEpoch,
    Update,
)
from tests.simulator.effect import Memory
from tests.simulator.faults import Scenario
from tests.simulator.rules import Rules, Violation


def rules(policy: Policy = "cadence") -> Rules:
    config = CoordinatorConfig(
        world_size=2,
        batches=4,
        epochs=1,
        policy=policy,
        cadence=CadenceOptions(max_batch_diff=1, max_anchor=20),
    )
    return Rules(Scenario(seed=0, config=config, ms_per_step=(1.0, 1.0), batch_size=8, last_batch=3))


def wish_for(judge: Rules, request: Requested) -> None:
    judge.wishes(request, Coordinator(judge.scenario.config), 0.0)


def train(judge: Rules, rank: int, *batches: int) -> None:
    for batch in batches:
        judge.step_begins(rank, (0, batch), 100)
        judge.step_ends(rank, Step(0, (batch,), 100))


def outcome(steps: tuple[int, int], samples: tuple[int, int], round: int = 0, **wishes: object) -> Outcome:
    return Outcome(round, sum(steps), (0, 1), steps, samples, **wishes)  # type: ignore[arg-type]


def record(global_step: int, steps: tuple[int, int], anchor: int = 10) -> RoundEnded:
    zeros = (0.0, 0.0)
    return RoundEnded(0, 1, 0, global_step, steps, (0, 0), 1.0, 0.1, 1.0, zeros, zeros, zeros, 0.0, anchor)


def epoch(number: int, steps: int, samples: int, rounds: int = 1) -> EpochEnded:
    tally = Tally(number, 2)
    tally.close_round(0.0, None, rounds)
    tally.add(0, Work(number, steps, samples))
    return EpochEnded(tally.result(1.0, 1, steps, 1))


def held(judge: Rules) -> None:
    """A round of four batches, met by both ranks."""
    train(judge, 0, 0)
    train(judge, 1, 1)
    train(judge, 0, 2)
    train(judge, 1, 3)
    both = outcome((2, 2), (16, 11))
    judge.met(0, both)
    judge.met(1, both)


def twice(judge: Rules) -> None:
    train(judge, 0, 2)
    train(judge, 1, 2)


def other_outcome(judge: Rules) -> None:
    judge.met(0, outcome((0, 0), (0, 0)))
    judge.met(1, outcome((0, 0), (0, 0)))  # equal, but not the same one


def phantom_step(judge: Rules) -> None:
    train(judge, 0, 0)
    judge.met(0, outcome((2, 0), (8, 0)))


def planned_weight(judge: Rules) -> None:
    train(judge, 0, 3)
    judge.met(0, outcome((1, 0), (8, 0)))


def round_of_no_epoch(judge: Rules) -> None:
    held(judge)
    judge.reported(record(4, (2, 2)), (2, 2))
    judge.ended(epoch(0, 4, 27, rounds=0))


def round_after_its_epoch(judge: Rules) -> None:
    held(judge)
    judge.reported(record(4, (2, 2)), (2, 2))
    judge.ended(epoch(0, 4, 27))
    judge.reported(record(4, (0, 0)), (2, 2))


def late_order(judge: Rules) -> None:
    judge.ordered(1, Shutdown(), is_gone=True)


def falling_step(judge: Rules) -> None:
    judge.reported(record(4, (2, 2)), ())
    judge.reported(record(3, (0, 0)), ())


def uncredited_step(judge: Rules) -> None:
    judge.reported(record(5, (2, 2)), ())


def no_quota(judge: Rules) -> None:
    judge.reported(record(0, (0, 0)), (3, 0))


def no_pace(judge: Rules) -> None:
    judge.ordered(0, StartEpoch(0, 0, (0,), pace=Pace(2, 0)), is_gone=False)


def wild_anchor(judge: Rules) -> None:
    judge.reported(record(0, (0, 0), anchor=21), ())


def long_lead(judge: Rules) -> None:
    judge.step_begins(1, (0, 3), 0)
    judge.is_moving[1] = True
    train(judge, 0, 0, 1, 2)


def skipped_epoch(judge: Rules) -> None:
    judge.ended(epoch(1, 0, 0))


def short_epoch(judge: Rules) -> None:
    train(judge, 0, 0, 1)
    judge.ended(epoch(0, 2, 16))


def missing_samples(judge: Rules) -> None:
    held(judge)
    judge.ended(epoch(0, 4, 32))


def false_snapshot(judge: Rules) -> None:
    train(judge, 0, 0)
    judge.snapped(0, 0, 1, 7)


def stale_snapshot(judge: Rules) -> None:
    judge.snapped(0, 1, 0, 0)
    judge.snapped(1, 0, 0, 0)
    judge.averages(1, (0, 0))


def false_weights(judge: Rules) -> None:
    train(judge, 0, 0)
    judge.snapped(0, 0, 1, 8)
    judge.snapped(1, 0, 0, 0)
    judge.averages(0, (8, 8))


def foreign_mean(judge: Rules) -> None:
    judge.ordered(0, Update(1, 4), is_gone=False)
    judge.snapped(0, 0, 0, 0)
    judge.applied(0, 1)


def step_in_a_pause(judge: Rules) -> None:
    judge.paused(Paused(True), False)
    train(judge, 0, 0)


def pause_in_a_step(judge: Rules) -> None:
    judge.paused(Paused(True), True)


def told_twice(judge: Rules) -> None:
    wish_for(judge, Requested("set_lr", 0.1))
    for round in (0, 1):
        judge.met(0, outcome((0, 0), (0, 0), round, lr=0.1))


def behind_the_mean(judge: Rules) -> None:
    held(judge)
    judge.step_begins(0, (0, 0), 3)


def behind_a_mean_of_snapshots(judge: Rules) -> None:
    judge.ordered(0, Update(0, 4), is_gone=False)
    judge.snapped(0, 0, 0, 0)
    judge.applied(0, 0)
    judge.step_begins(0, (0, 0), 3)


def deaf_to_a_wish(judge: Rules) -> None:
    wish_for(judge, Requested("pause"))
    for _ in range(4):
        judge.reported(record(0, (0, 0)), ())


def too_long(judge: Rules) -> None:
    judge.passes(judge.bounds.longest_run_ms)
    judge.passes(judge.bounds.longest_run_ms + 1)


def late_leave(judge: Rules) -> None:
    judge.must_end("L2", 10.0, rounds=2)
    judge.passes(10.0)
    judge.left(1)
    judge.passes(30.0)


def deadlock_after_a_stop(judge: Rules) -> None:
    judge.must_end("L3", 10.0, rounds=4)
    judge.stands_still("both idle")


def deadlock(judge: Rules) -> None:
    judge.stands_still("both idle")


def beyond_the_end(judge: Rules) -> None:
    judge.ordered(0, StartEpoch(0, 0, (2, 3)), is_gone=False)
    judge.knows_end(DataEnded(0, 3))
    judge.ordered(0, StartEpoch(0, 1, (3,)), is_gone=False)
    judge.ordered(0, StartEpoch(0, 0, (2,)), is_gone=False)
    judge.ordered(0, StartEpoch(0, 0, (2, 3)), is_gone=False)


def waits_for_nothing(judge: Rules) -> None:
    judge.waits(0, (0, 3), 0.0)  # that one exists
    judge.waits(1, (0, 4), 1.0)
    judge.passes(50.0)  # nobody knows
    judge.read_end(DataEnded(0, 4), 50.0)
    judge.waits(1, (0, 4), 50.1)
    judge.passes(50.2)
    judge.passes(50.3)


def deadlock_at_the_end_of_the_data(judge: Rules) -> None:
    judge.waits(1, (0, 4), 1.0)
    judge.stands_still("rank 1 waits")


BROKEN: list[tuple[str, Callable[[Rules], None]]] = [
    ("S1", twice),
    ("S2", other_outcome),
    ("S2", phantom_step),
    ("S2", planned_weight),
    ("S3", late_order),
    ("S4", falling_step),
    ("S4", uncredited_step),
    ("S5", no_quota),
    ("S5", no_pace),
    ("S5", wild_anchor),
    ("S6", long_lead),
    ("S7", skipped_epoch),
    ("S7", short_epoch),
    ("S7", missing_samples),
    ("S7", round_of_no_epoch),
    ("S7", round_after_its_epoch),
    ("S8", false_snapshot),
    ("S8", stale_snapshot),
    ("S8", false_weights),
    ("S8", foreign_mean),
    ("S10", step_in_a_pause),
    ("S10", pause_in_a_step),
    ("S12", told_twice),
    ("S13", behind_the_mean),
    ("S13", behind_a_mean_of_snapshots),
    ("S14", beyond_the_end),
    ("L1", too_long),
    ("L1", deadlock),
    ("L2", late_leave),
    ("L3", deadlock_after_a_stop),
    ("L4", deaf_to_a_wish),
    ("L5", waits_for_nothing),
    ("L5", deadlock_at_the_end_of_the_data),
]


@pytest.mark.parametrize(("rule", "break_it"), BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_broken(rule: str, break_it: Callable[[Rules], None]) -> None:
    with pytest.raises(Violation) as violation:
        break_it(rules())
    assert violation.value.rule == rule
    assert str(violation.value).startswith(f"{rule}: ")


def test_a_sound_run_passes() -> None:
    judge = rules()
    for wish in (Requested("set_lr", 0.1), Requested("pause"), Requested("unpause")):
        wish_for(judge, wish)
    held(judge)
    judge.reported(record(4, (2, 2)), (2, 2))
    told = outcome((0, 0), (0, 0), 1, lr=0.1)
    judge.met(0, told)
    judge.met(1, told)
    for _ in range(5):  # nothing waits any more: the rate was told, the pause taken back
        judge.reported(record(4, (0, 0)), (2, 2))
    judge.ended(epoch(0, 4, 27, rounds=6))
    judge.over(Finish(None, False, 4, 1), Coordinator(judge.scenario.config))
    assert judge.finish == Finish(None, False, 4, 1)


def test_a_lead_is_judged_within_a_round_only() -> None:
    judge = rules("sync")
    long_lead(judge)  # lockstep is the gate's there, and no limit is set
    assert judge.steps == [3, 0]


def test_all_have_left_in_time() -> None:
    judge = rules()
    judge.must_end("L2", 10.0, rounds=2)
    judge.left(0)
    judge.left(1)
    judge.passes(100.0)
    assert judge.is_moving == [False, False]


ENDS: list[tuple[str, Finish]] = [
    ("S4", Finish(None, True, 5, 1)),
    ("L1", Finish("rank 0 failed", False, 4, 1)),
    ("L1", Finish(None, True, 4, 1)),
    ("S7", Finish(None, False, 4, 0)),
]


@pytest.mark.parametrize(("rule", "finish"), ENDS)
def test_wrong_ends(rule: str, finish: Finish) -> None:
    judge = rules()
    held(judge)
    judge.ended(epoch(0, 4, 27, rounds=0))
    with pytest.raises(Violation) as violation:
        judge.over(finish, Coordinator(judge.scenario.config))
    assert violation.value.rule == rule


def test_an_end_without_a_last_mean() -> None:
    judge = rules()
    train(judge, 0, 0)
    with pytest.raises(Violation, match=r"^S9: "):
        judge.over(Finish(None, True, 1, 0), Coordinator(judge.scenario.config))


def test_an_end_with_batches_untrained() -> None:
    judge = rules()
    with pytest.raises(Violation, match=r"^S1: 4 batches"):
        judge.over(Finish(None, False, 0, 1), Coordinator(judge.scenario.config))


def test_a_stop_obeyed_in_different_rounds() -> None:
    judge = rules()
    last = outcome((0, 0), (0, 0), stop=True)
    judge.met(0, last)
    with pytest.raises(Violation, match=r"^S11: "):
        judge.over(Finish(None, True, 0, 0), Coordinator(judge.scenario.config))


# ---------------------------------------------------------------- failures that a run survives, and lives
FAILS = Exiting(1, "boom", is_alone=True)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_goes_on_where_it_can_and_shall(goes_on: bool) -> None:
    judge = rules()
    with pytest.raises(Violation, match=r"^S20: "):
        judge.exits(FAILS, 0.0, may=not goes_on, goes_on=goes_on)


def test_the_others_have_to_leave_where_it_does_not() -> None:
    judge = rules()
    judge.exits(FAILS, 0.0, may=False, goes_on=False)
    with pytest.raises(Violation, match=r"^L2: "):
        judge.passes(90.0)
    judge = rules()
    judge.exits(FAILS, 0.0, may=True, goes_on=True)
    judge.passes(90.0)


def test_a_lost_rank_is_judged_no_more() -> None:
    judge = rules()
    train(judge, 1, 1)
    judge.left(1)
    judge.loses(1)
    train(judge, 0, 0)
    judge.met(0, Outcome(0, 1, (0,), (1, 0), (8, 0), left=(1,)))
    judge.reported(record(1, (1, 0)), (3, 0))  # its quota is 0
    with pytest.raises(Violation, match=r"^S5: "):
        judge.reported(record(1, (0, 0)), (0, 3))
    wish_for(judge, Requested("stop"))
    judge.over(Finish(None, True, 1, 0), Coordinator(judge.scenario.config))


def test_a_life_goes_on_where_the_one_before_was_saved() -> None:
    memory = Memory(trained=Counter({(0, batch): 1 for batch in range(4)}), global_step=9, epochs=1)
    config = CoordinatorConfig(world_size=2, batches=4, epochs=2)
    judge = Rules(Scenario(seed=0, config=config, ms_per_step=(1.0, 1.0)), memory)
    with pytest.raises(Violation, match=r"^S13: "):
        judge.step_begins(0, (1, 0), 8)
    with pytest.raises(Violation, match=r"^S1: "):
        train(judge, 0, 0)
    with pytest.raises(Violation, match=r"^S4: "):
        judge.reported(record(8, (0, 0)), ())
    with pytest.raises(Violation, match=r"^S7: "):
        judge.ended(epoch(0, 4, 32))


def nothing_moves(judge: Rules) -> None:
    for _ in range(20_000):
        judge.passes(1.0)


def endless_rounds(judge: Rules) -> None:
    for number in range(1000):
        told = outcome((0, 0), (0, 0), number)
        judge.met(0, told)
        judge.met(1, told)


@pytest.mark.parametrize("livelock", [nothing_moves, endless_rounds])
def test_a_livelock_is_noticed_before_its_time(livelock: Callable[[Rules], None]) -> None:
    with pytest.raises(Violation, match=r"^L1: "):
        livelock(rules())


def test_steps_that_were_not_taken() -> None:
    rules().reports(1, Done(0, 0, 3), 3)
    with pytest.raises(Violation, match=r"^S4: rank 1 took 0 steps"):
        rules().reports(1, Done(0, 0, 1), 0)
