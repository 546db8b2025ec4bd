"""Tests of sync rounds: one step per rank, and those of one device."""

from __future__ import annotations

import pytest

from flowdp.machine.planned_rounds import ORDER_MS, ORDER_STEPS
from flowdp.protocol.messages import SyncPoints
from tests.planned import acks, decide, ends, orders, rounds, settle, stream, sync, sync_now


def test_sync_is_one_step_of_every_rank_and_never_hurried() -> None:
    machine = rounds(batches=9, cadence=False)
    [probe] = orders(decide(machine))
    assert [block.batches for block in probe.values()] == [(0,), (1,)]
    assert not sync(probe[0]).drift
    assert decide(machine, 1e6, hold=True) == []
    assert machine.deadline_ms() is None
    settle(machine, acks(probe))
    # Three rounds fit in a block; the last batch has no partner.
    block, tail = orders(decide(machine))
    assert [order.batches for order in block.values()] == [(2, 4, 6), (3, 5, 7)]
    assert sync(block[0]) == SyncPoints(1, 1, 3, 2, 2)
    assert [order.batches for order in tail.values()] == [(8,), ()]
    assert [sync(order).every for order in tail.values()] == [1, 0]
    assert sync(tail[0]).global_step == 8
    record = settle(machine, acks(block))
    assert (record.round, record.rounds, record.global_step) == (3, 3, 8)


def test_a_block_lasts_about_a_fifth_of_a_second() -> None:
    machine = rounds(batches=1000, cadence=False)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe, pace_ms=(9.0, 5.0)))
    first, _second = orders(decide(machine))
    # 9 ms and 1 ms of averaging.
    assert sync(first[0]).count == ORDER_MS / 10 == 20


def test_a_block_has_a_limit() -> None:
    machine = rounds(batches=3000, cadence=False)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe, pace_ms=(0.1, 0.1), sync_ms=0.0))
    first, _second = orders(decide(machine))
    assert sync(first[0]).count == ORDER_STEPS


def test_a_block_that_is_voided_in_the_middle() -> None:
    machine = rounds(batches=100, cadence=False)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe))
    first, _second = orders(decide(machine))
    # A pause at its second round: two rounds were held, the rest is given back.
    record = settle(machine, acks(first, rounds_held=2, pause=True))
    assert (record.rounds, record.steps) == (2, (2, 2))
    assert machine.epochs.of(0).position == 6
    again, _ = orders(decide(machine))
    assert again[0].batches[0] == 6
    assert sync(again[0]).global_step == 6


def test_one_device_needs_no_rank_to_wait_for() -> None:
    machine = rounds(batches=80, world_size=1, cadence=False)
    [probe] = orders(decide(machine))
    assert probe[0].batches == (0,)
    settle(machine, acks(probe, pace_ms=(5.0,), sync_ms=0.0))
    first, second = orders(decide(machine))
    # 40 steps are 200 ms; such blocks can be cut short.
    assert (sync(first[0]).every, sync(first[0]).count) == (40, 1)
    assert len(second[0].batches) == 39
    assert decide(machine, hold=True) == sync_now(sync(first[0]).round, ranks=1)


def test_sync_with_steps_of_several_batches() -> None:
    machine = rounds(9, cadence=False, groups=(2, 1))
    [first] = orders(decide(machine))
    settle(machine, acks(first))
    [block] = orders(decide(machine))
    # Two more rounds of one step each: three batches a round.
    assert [block[rank].batches for rank in (0, 1)] == [(3, 4, 6, 7), (5, 8)]
    assert [(sync(block[rank]).every, sync(block[rank]).count) for rank in (0, 1)] == [(1, 2), (1, 2)]
    settle(machine, acks(block))
    assert machine.global_step == 6
    assert machine.epochs.of(0).is_complete


@pytest.mark.parametrize("length", [7, 8])
def test_in_sync_a_block_is_held_up_to_the_round_that_is_short(length: int) -> None:
    machine = stream(cadence=False, epochs=2)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe))
    block, behind = orders(decide(machine))
    assert sync(block[0]).count > length
    ends(machine, 0, length)
    assert [len(hand) for hand in machine._armed[0].deal] == [(length + 1) // 2 - 1, length // 2 - 1]
    assert machine._armed[1].deal == ((), ())
    done = (((length + 1) // 2 - 1), length // 2 - 1)
    settle(machine, acks(block, steps=done, rounds_held=max(done) + (length == 8), hurried=True))
    assert len(machine.epochs.ended(1.0, 1, length)) == 1
    assert behind[0].plan == block[0].plan
    [following, *_] = orders(decide(machine))
    assert (following[0].epoch, following[0].plan) == (1, block[0].plan + 1)


def test_nothing_is_armed_from_the_limit_on() -> None:
    machine = rounds(cadence=False)
    [first] = orders(decide(machine))
    settle(machine, acks(first, pace_ms=(1.0, 1.0)))
    # Two were held: twelve are left, and the round that crosses the limit is not cut.
    [block] = orders(decide(machine, limit=13))
    assert sync(block[0]).count == 6
    assert [len(order.batches) for order in block.values()] == [6, 6]
    settle(machine, acks(block, pace_ms=(1.0, 1.0)))
    assert machine.global_step == 14
    assert decide(machine, limit=13) == []
    assert machine.is_idle
    [block] = orders(decide(machine, limit=26))
    assert sync(block[0]).count == 6
