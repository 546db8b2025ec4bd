"""Tests of rounds armed by one order: those that took place, by acknowledgments and a lost rank."""

from __future__ import annotations

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.armed_rounds import ArmedRounds, Dealt
from flowdp.protocol.messages import DataEnded, Outcome, SyncAck, SyncPoints, Work

DEAL = ((0, 2, 4), (1, 3, 5))


def block(count: int = 3) -> ArmedRounds:
    every = tuple(len(hand) // count for hand in DEAL)
    return ArmedRounds(
        0, SyncPoints(7, every[0], count, 20, 2), 1, Dealt(count, DEAL), every, 2 * count, 10.0
    )


def outcome(round: int, members: tuple[int, ...] = (0, 1), steps: tuple[int, int] = (1, 1)) -> Outcome:
    return Outcome(round, 22, members, steps, (8, 8))


def test_its_last_round() -> None:
    assert block().last_round == 9
    assert block(1).last_round == 7


def test_all_who_are_there_leave_it_with_one_outcome() -> None:
    made = block()
    made.acks = {rank: SyncAck(rank, outcome(9), Work(1, 3, 24)) for rank in (0, 1)}
    assert made.held([0, 1], {}).outcome == outcome(9)
    made.acks[1] = SyncAck(1, outcome(8), Work(1, 2, 16))
    with pytest.raises(ProtocolError, match="rank 1 left round 9 with another outcome"):
        made.held([0, 1], {})
    held = made.held([1], {})
    assert (held.outcome, held.rounds) == (outcome(8), 2)


def test_what_a_rank_did_is_what_it_said() -> None:
    made = block()
    made.acks[1] = SyncAck(1, outcome(9), Work(1, 3, 24, busy_ms=5.0))
    assert made.held([1], {}).works[1] == Work(1, 3, 24, busy_ms=5.0)


@pytest.mark.parametrize(
    ("count", "last", "steps"),
    [
        (3, outcome(9), 3),  # it is in the last mean, and was lost before its acknowledgment
        (3, outcome(8, (0,), (1, 0)), 1),  # it is only in the mean of round 7
        (3, outcome(7, (0,), (1, 0)), 0),
        (1, outcome(7, (0, 1), (3, 2)), 2),  # it was called early to the last mean
        (1, outcome(7, (0,), (3, 0)), 0),
    ],
)
def test_what_a_rank_did_that_is_gone_is_what_the_means_hold(count: int, last: Outcome, steps: int) -> None:
    made = block(count)
    made.acks[0] = SyncAck(0, last, Work(1, 3, 24, wait_ms=2.0, sync_ms=1.5), 0.5)
    held = made.held([0], {1: 16})
    assert held.works[1] == Work(1, steps, 16)
    assert (held.sync_ms, held.inner_ms, held.longest_ms) == (0.5, 1.0, 3.5)


def test_an_epoch_that_is_shorter_than_what_was_dealt() -> None:
    made = block()
    assert made.shorten(DataEnded(0, 1)) == []
    assert made.shorten(DataEnded(1, 5)) == [1]
    assert made.dealt.hands == ((0, 2, 4), (1, 3))
    assert made.shorten(DataEnded(1, 5)) == []
