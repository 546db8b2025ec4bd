"""Each rule, broken by hand; the mutants show that they bite in whole runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.coordinator import Coordinator
from flowdp.machine.worker import Done, Step
from flowdp.options import CadenceOptions, Policy
from flowdp.policy.tally import Tally, Work
from flowdp.protocol.commands import EpochMetrics, Finish, Paused, RoundEnded
from flowdp.protocol.messages import (
    Outcome,
    Pace,
    Requested,
    StartEpoch,
    Update,
)
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


def epoch(number: int, steps: int, samples: int, rounds: int = 1) -> EpochMetrics:
    tally = Tally(number, 2)
    tally.close_round(0.0, None, rounds)
    tally.add(0, Work(number, steps, samples))
    return tally.result(1.0, 1, steps, 1)


def held(judge: Rules) -> None:
    """A round of four batches, met by both ranks."""
    train(judge, 0, 0)
    train(judge, 1, 1)
    train(judge, 0, 2)
    train(judge, 1, 3)
    both = outcome((2, 2), (16, 11))
    judge.met(0, both)
    judge.met(1, both)


def other_outcome(judge: Rules) -> None:
    judge.met(0, outcome((0, 0), (0, 0)))
    judge.met(1, outcome((0, 0), (0, 0)))  # equal, but not the same one


def round_of_no_epoch(judge: Rules) -> None:
    held(judge)
    judge.reported(record(4, (2, 2)), (2, 2))
    judge.ended(epoch(0, 4, 27, rounds=0))


def round_after_its_epoch(judge: Rules) -> None:
    held(judge)
    judge.reported(record(4, (2, 2)), (2, 2))
    judge.ended(epoch(0, 4, 27))
    judge.reported(record(4, (0, 0)), (2, 2))


def falling_step(judge: Rules) -> None:
    judge.reported(record(4, (2, 2)), ())
    judge.reported(record(3, (0, 0)), ())


def uncredited_step(judge: Rules) -> None:
    judge.reported(record(5, (2, 2)), ())


def no_pace(judge: Rules) -> None:
    judge.ordered(0, StartEpoch(0, 0, (0,), pace=Pace(2, 0)), is_gone=False)


def wild_anchor(judge: Rules) -> None:
    judge.reported(record(0, (0, 0), anchor=21), ())


def skipped_epoch(judge: Rules) -> None:
    judge.ended(epoch(1, 0, 0))


def missing_samples(judge: Rules) -> None:
    held(judge)
    judge.ended(epoch(0, 4, 32))


def false_weights(judge: Rules) -> None:
    train(judge, 0, 0)
    judge.snapped(0, 0, 1, 8)
    judge.snapped(1, 0, 0, 0)
    judge.averages(0, (8, 8))


def foreign_mean(judge: Rules) -> None:
    judge.ordered(0, Update(1, 4), is_gone=False)
    judge.snapped(0, 0, 0, 0)
    judge.applied(0, 1)


def pause_in_a_step(judge: Rules) -> None:
    judge.paused(Paused(True), True)


def behind_a_mean_of_snapshots(judge: Rules) -> None:
    judge.ordered(0, Update(0, 4), is_gone=False)
    judge.snapped(0, 0, 0, 0)
    judge.applied(0, 0)
    judge.step_begins(0, (0, 0), 3)


def too_long(judge: Rules) -> None:
    judge.passes(judge.bounds.longest_run_ms)
    judge.passes(judge.bounds.longest_run_ms + 1)


def deadlock_at_the_end_of_the_data(judge: Rules) -> None:
    judge.waits(1, (0, 4), 1.0)
    judge.stands_still("rank 1 waits")


BROKEN: list[tuple[str, Callable[[Rules], None]]] = [
    ("S2", other_outcome),
    ("S4", falling_step),
    ("S4", uncredited_step),
    ("S5", no_pace),
    ("S5", wild_anchor),
    ("S7", skipped_epoch),
    ("S7", missing_samples),
    ("S7", round_of_no_epoch),
    ("S7", round_after_its_epoch),
    ("S8", false_weights),
    ("S8", foreign_mean),
    ("S10", pause_in_a_step),
    ("S13", behind_a_mean_of_snapshots),
    ("L1", too_long),
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
    told = outcome((0, 0), (0, 0), 1, lr=(Requested("set_lr", 0.1),))
    judge.met(0, told)
    judge.met(1, told)
    for _ in range(5):  # nothing waits any more: the rate was told, the pause taken back
        judge.reported(record(4, (0, 0)), (2, 2))
    judge.ended(epoch(0, 4, 27, rounds=6))
    judge.over(Finish(None, False, 4, 1), Coordinator(judge.scenario.config))
    assert judge.finish == Finish(None, False, 4, 1)


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


def test_an_end_with_batches_untrained() -> None:
    judge = rules()
    with pytest.raises(Violation, match=r"^S1: 4 batches"):
        judge.over(Finish(None, False, 0, 1), Coordinator(judge.scenario.config))


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
