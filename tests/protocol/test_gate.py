"""Tests of the gate's records and of its state: who meets, and what all of them do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from flowdp.errors import CollectiveAborted, ProtocolError
from flowdp.protocol import messages
from flowdp.protocol.gate import Arrival, Directives, GateState, Outcome, PartState, Requested, Window, decide

FASTER, SLOWER = Requested("set_lr", 0.2), Requested("scale_lr", 0.5)


@pytest.mark.parametrize(
    ("wishes", "voids"),
    [
        ({}, False),
        ({"lr": 0.1}, False),
        ({"stop": True}, True),
        ({"pause": True}, True),
        ({"hurried": True}, True),
        ({"left": (1,)}, True),
    ],
)
def test_what_voids(wishes: dict[str, object], voids: bool) -> None:
    assert Outcome(0, 2, (0, 1), (1, 1), (8, 8), **wishes).voids is voids  # type: ignore[arg-type]


def test_they_are_frozen_and_messages_too() -> None:
    with pytest.raises(FrozenInstanceError):
        Directives().stop = True  # type: ignore[misc]
    assert messages.Outcome is Outcome


def arrival(rank: int, steps: int = 1, *, round: int = 0, global_step: int = 0, left: int = 0) -> Arrival:
    return Arrival(rank, round, global_step, steps, 8 * steps, left)


def test_the_outcome_counts_what_was_done() -> None:
    # Rank 2 left before; rank 1 comes without a step.
    outcome = decide(
        {1: arrival(1, 0, round=4, global_step=10), 0: arrival(0, 3, round=4, global_step=10)},
        Directives(),
        world_size=3,
        left=(2,),
    )
    assert outcome == Outcome(
        round=4, global_step=13, members=(0, 1), steps=(3, 0, 0), samples=(24, 0, 0), left=(2,)
    )
    assert outcome.voids


def test_one_member_with_batches_left_makes_the_round_a_hurried_one() -> None:
    outcome = decide({0: arrival(0, 3), 1: arrival(1, 1, left=2)}, Directives(), 2)
    assert outcome.hurried
    assert outcome.voids


def together(rank: int, steps: int, *, compare: bool = False) -> Arrival:
    return Arrival(rank, 3, 10, steps, 8 * steps, window=Window(compare=compare))


def test_steps_taken_together_are_one_step() -> None:
    outcome = decide({rank: together(rank, steps) for rank, steps in enumerate((1, 1, 0))}, Directives(), 3)
    assert (outcome.global_step, outcome.steps, outcome.samples) == (11, (1, 1, 0), (8, 8, 0))
    assert decide({0: together(0, 0)}, Directives(), 1).global_step == 10


ALL, SOME = b"\0\1\1", b"\0\1\0"


@pytest.mark.parametrize(
    ("second", "alike"),
    [
        ({"window": Window(touched=ALL)}, ALL),
        ({"window": Window(touched=SOME)}, None),
        ({"window": Window(touched=SOME), "steps": 0, "samples": 0}, ALL),
        ({"window": Window(touched=SOME), "bad": True}, ALL),
    ],
)
def test_whether_all_that_count_have_touched_the_same_parameters(
    second: dict[str, Any], alike: bytes | None
) -> None:
    came = {0: replace(together(0, 1), window=Window(touched=ALL)), 1: replace(together(1, 1), **second)}
    assert decide(came, Directives(), 2).window == Window(touched=alike)


def test_replicas_are_compared_where_an_order_says_so_and_at_a_stop() -> None:
    assert decide({0: together(0, 1), 1: together(1, 1)}, Directives(), 2).window == Window()
    compared = Window(compare=True)
    assert decide({0: together(0, 1), 1: together(1, 1, compare=True)}, Directives(), 2).window == compared
    assert decide({0: together(0, 1)}, Directives(stop=True), 1).window == compared
    # Replicas that step on their own differ before the mean.
    assert decide({0: arrival(0)}, Directives(stop=True), 1).window is None


def test_the_last_arrival_completes_the_round() -> None:
    gate = GateState(3)
    # The first two wait.
    assert gate.enter(arrival(2)) is None
    assert gate.enter(arrival(0)) is None
    # The third one makes the outcome, and the next round opens at once.
    outcome = gate.enter(arrival(1))
    assert outcome is not None
    assert outcome.members == (0, 1, 2)
    assert gate.arrivals == {}
    assert gate.enter(arrival(1, round=1)) is None


def test_a_leave_completes_the_round_of_the_others() -> None:
    gate = GateState(3)
    gate.enter(arrival(0))
    gate.enter(arrival(2))
    # Rank 1 was the last one missing.
    outcome = gate.leave(1)
    assert outcome is not None
    assert (outcome.members, outcome.left) == ((0, 2), (1,))
    # The leave was reported; from now on two are enough, without a report.
    gate.enter(arrival(0, round=1))
    outcome = gate.enter(arrival(2, round=1))
    assert outcome is not None
    assert outcome.left == ()


def test_a_leave_takes_its_arrival_along() -> None:
    gate = GateState(2)
    gate.enter(arrival(0, 5))
    # Rank 0 leaves while it waits: nothing is complete, and rank 1 meets alone.
    assert gate.leave(0) is None
    assert gate.leave(0) is None
    outcome = gate.enter(arrival(1))
    assert outcome is not None
    assert (outcome.members, outcome.steps, outcome.left) == ((1,), (0, 1), (0,))


def test_when_all_have_left_nobody_meets() -> None:
    gate = GateState(2)
    assert gate.leave(0) is None
    assert gate.leave(1) is None
    with pytest.raises(ProtocolError, match="rank 0 entered the gate after it left"):
        gate.enter(arrival(0))


def test_an_abort_is_for_ever_and_the_first_reason_stays() -> None:
    gate = GateState(2)
    gate.enter(arrival(0))
    gate.abort("rank 1 ran out of memory")
    gate.abort("rank 0 failed, too")
    with pytest.raises(CollectiveAborted, match="rank 1 ran out of memory"):
        gate.enter(arrival(1))
    # A leave completes nothing any more.
    assert gate.leave(1) is None


def test_a_wish_is_told_by_one_outcome_and_a_stop_by_all() -> None:
    gate = GateState(1)
    gate.direct(Directives(stop=True, pause=True, lr=(FASTER,)))
    first, second = gate.enter(arrival(0)), gate.enter(arrival(0, round=1))
    assert first is not None
    assert second is not None
    assert (first.stop, first.pause, first.lr) == (True, True, (FASTER,))
    assert (second.stop, second.pause, second.lr) == (True, False, ())


def test_a_learning_rate_stays_until_it_is_told() -> None:
    gate = GateState(1)
    gate.direct(Directives(lr=(FASTER,)))
    # Another request comes before an outcome: the rate still waits, the pause has its last value.
    gate.direct(Directives(pause=True))
    gate.direct(Directives())
    assert gate.directives == Directives(lr=(FASTER,))
    # Another one follows it.
    assert gate.direct(Directives(lr=(SLOWER,))) == (FASTER, SLOWER)
    outcome = gate.enter(arrival(0))
    assert outcome is not None
    assert (outcome.pause, outcome.lr) == (False, (FASTER, SLOWER))
    # It was delivered: a later request does not repeat it.
    assert gate.direct(Directives(pause=True)) == ()
    assert gate.directives == Directives(pause=True)


def test_a_bad_replica_weighs_nothing_and_voids_what_is_armed() -> None:
    came = {0: arrival(0, 3), 1: replace(arrival(1, 2), bad=True)}
    outcome = decide(came, Directives(), 2)
    assert (outcome.steps, outcome.samples, outcome.bad) == ((3, 2), (24, 0), (1,))
    assert outcome.voids


def test_a_part_gathers_the_arrivals_of_its_ranks_and_decides_nothing() -> None:
    part = PartState([2, 3], 4)
    assert part.enter(arrival(3)) is None
    assert part.gathered == ()
    assert part.enter(arrival(2)) is None
    assert part.gathered == (arrival(2), arrival(3))
    whole = GateState(4)
    outcomes = [whole.enter(one) for one in (arrival(0), arrival(1), *part.gathered)]
    assert outcomes[:3] == [None] * 3
    assert outcomes[3] is not None
    assert outcomes[3].steps == (1, 1, 1, 1)
    part.conclude(outcomes[3])
    assert part.enter(arrival(2, round=1)) is None
    assert part.gathered == ()


# ---------------------------------------------------------------- inner rounds of one machine
def come(rank: int, steps: int = 1, round: int = 0) -> Arrival:
    return arrival(rank, steps, round=round)


def inner(rank: int, steps: int = 1, round: int = 0, *, bad: bool = False) -> Arrival:
    return replace(come(rank, steps, round), inner=True, bad=bad)


def last(part: PartState, *came: Arrival, others: Sequence[Arrival] = (), ranks: int = 4) -> Outcome:
    """The round of all machines."""
    for one in came:
        assert part.enter(one) is None
    whole = GateState(ranks)
    outcomes = [whole.enter(one) for one in (*part.gathered, *others)]
    outcome = outcomes[-1]
    assert outcome is not None
    part.conclude(outcome)
    return outcome


def met(part: PartState, *came: Arrival) -> Outcome:
    """An inner round."""
    outcomes = [part.enter(one) for one in came]
    assert outcomes[:-1] == [None] * (len(came) - 1)
    outcome = outcomes[-1]
    assert outcome is not None
    return outcome


def test_an_inner_round_is_decided_on_its_machine_and_voids_nothing() -> None:
    part = PartState([2, 3], 4)
    part.direct(Directives(stop=True, halt=True))  # those of all machines are at the gate of all
    outcome = met(part, inner(3, 4), replace(inner(2, 1), left=2))
    assert (outcome.members, outcome.steps, outcome.samples) == ((2, 3), (0, 0, 1, 4), (0, 0, 8, 32))
    assert (outcome.inner, outcome.hurried, outcome.voids) == (True, True, False)
    assert (outcome.stop, outcome.halt, outcome.global_step) == (False, False, 5)
    assert met(part, inner(2, 1, 1), inner(3, 2, 1)).global_step == 8
    assert part.gathered == ()


def test_the_weights_of_all_are_the_samples_since_their_last_mean() -> None:
    part = PartState([2, 3], 4)
    met(part, inner(2, 1), inner(3, 4))
    outcome = last(part, come(2, 2, 1), come(3, 3, 1), others=(come(0, 5, 1), come(1, 0, 1)))
    assert (outcome.steps, outcome.samples) == ((5, 0, 2, 3), (40, 0, 16, 24))
    assert outcome.weights == (40, 0, 24, 56)
    assert outcome.global_step == 5 + 10
    assert outcome.local_weights([2, 3]) == (16, 24)
    # The next one counts anew.
    again = last(part, come(2, 1, 2), come(3, 1, 2), others=(come(0, 1, 2), come(1, 1, 2)))
    assert (again.earlier, again.weights) == ((), (8, 8, 8, 8))


def test_replicas_that_have_not_trained_since_an_inner_mean_are_that_mean() -> None:
    part = PartState([0, 1], 3)
    met(part, inner(0, 1), inner(1, 4))
    outcome = last(part, come(0, 0, 1), come(1, 0, 1), others=(come(2, 0, 1),), ranks=3)
    assert outcome.weights == (8, 32, 0)
    assert outcome.local_weights([0, 1]) == (1, 1)
    assert outcome.local_weights([2]) == (0,)
    assert outcome.drift is False


def test_a_drift_is_measured_where_earlier_rounds_give_weight() -> None:
    part = PartState([0], 2)
    met(part, inner(0, 1))
    wants = replace(come(1, 3, 1), drift=True)
    assert last(part, replace(come(0, 0, 1), drift=True), others=(wants,), ranks=2).drift


def test_a_bad_replica_is_left_out_of_its_inner_mean_and_of_that_of_all() -> None:
    part = PartState([0, 1], 3)
    outcome = met(part, inner(0, 2), inner(1, 3, bad=True))
    assert (outcome.samples, outcome.bad, outcome.voids) == ((16, 0, 0), (1,), False)
    # It says so until all have heard that it is to be healed.
    all_ = last(part, come(0, 1, 1), replace(come(1, 1, 1), bad=True), others=(come(2, 1, 1),), ranks=3)
    assert (all_.weights, all_.bad, all_.voids) == ((24, 0, 8), (1,), True)


def test_a_machine_without_a_healthy_replica_weighs_nothing() -> None:
    part = PartState([0, 1], 3)
    met(part, inner(0, 2), inner(1, 3))
    met(part, inner(0, 1, 1, bad=True), inner(1, 1, 1, bad=True))
    bad = [replace(come(rank, 1, 2), bad=True) for rank in (0, 1)]
    outcome = last(part, *bad, others=(come(2, 1, 2),), ranks=3)
    assert (outcome.weights, outcome.bad) == ((0, 0, 8), (0, 1))
    assert outcome.local_weights([0, 1]) == (0, 0)
    assert outcome.global_step == 5 + 2 + 3
