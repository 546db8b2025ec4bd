"""Tests of planned rounds: orders and records for given acknowledgments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowdp.machine.planned_rounds import ORDER_MS
from flowdp.protocol.commands import RoundEnded, Send
from flowdp.protocol.messages import DataEnded, SyncAck, SyncPoints
from tests.planned import acks, decide, ends, lost, orders, rounds, settle, stream, sync, sync_now


def test_from_then_on_one_round_runs_and_one_lies_ready() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    record = settle(machine, acks(probe, pace_ms=(10.0, 20.0)), 60.0)
    assert (record.round, record.global_step, record.steps) == (0, 6, (3, 3))
    # Rank 0 is twice as fast: it gets twice as many, in both rounds.
    first, second = orders(decide(machine, 60.0))
    assert [len(first[0].batches), len(first[1].batches)] == [20, 10]
    assert (sync(first[0]).round, sync(first[0]).global_step) == (1, 6)
    assert (sync(second[0]).round, sync(second[0]).global_step) == (2, 36)
    assert sync(first[1]).every == 10
    # One is acknowledged, one more is armed.
    settle(machine, acks(first, pace_ms=(10.0, 20.0)), 260.0)
    [third] = orders(decide(machine, 260.0))
    assert sync(third[0]).round == 3


def test_answers_to_the_next_order_may_come_first() -> None:
    machine = rounds(speed_hint=(1, 1.0))
    [first] = orders(decide(machine))
    settle(machine, acks(first))
    second, third = orders(decide(machine))
    (a2, b2), (a3, b3) = acks(second), acks(third)
    # Rank 0 has done both before rank 1 reports.
    assert machine.take(a2, 1.0) == []
    assert machine.take(a3, 2.0) == []
    [record] = machine.take(b2, 3.0)
    assert isinstance(record, RoundEnded)
    assert record.round == sync(second[0]).round
    [record] = machine.take(b3, 4.0)
    assert isinstance(record, RoundEnded)
    assert record.round == sync(third[0]).round


def test_the_record_of_a_round() -> None:
    machine = rounds()
    [probe] = orders(decide(machine, 100.0))
    record = settle(machine, acks(probe, pace_ms=(10.0, 20.0), drift=0.01), 162.0)
    assert record == RoundEnded(
        round=0,
        rounds=1,
        epoch=0,
        global_step=6,
        steps=(3, 3),
        samples=(24, 24),
        loss=1.0,
        lr=0.0,
        wall_ms=62.0,
        busy_ms=(30.0, 60.0),
        data_ms=(0.0, 0.0),
        wait_ms=(2.0, 2.0),
        sync_ms=1.0,
        anchor=10,
        drift=0.01,
        share=(2 / 3, 1 / 3),
    )


def test_a_hurried_round_is_planned_anew() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    settle(machine, acks(probe), 30.0)
    first, _second = orders(decide(machine, 30.0))
    # Rank 1 came with 4 of its 10 steps.
    record = settle(machine, acks(first, steps=(10, 4), hurried=True), 100.0)
    assert record.reason == "it took too long and was cut short"
    # The round armed after it is void. Rank 1 begins with its remaining batches, except the very last batch
    # dealt, which counts as never dealt.
    third, _fourth = orders(decide(machine, 100.0))
    left = first[1].batches[4:-1]
    assert third[1].batches[: len(left)] == left
    assert third[0].plan == 1
    assert (sync(third[0]).round, sync(third[0]).global_step) == (sync(first[0]).round + 2, 20)


def test_batches_of_void_rounds_are_dealt_again() -> None:
    machine = rounds(batches=30)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe))
    first, second = orders(decide(machine))
    settle(machine, acks(first, pause=True))
    # Nothing during a hold.
    assert decide(machine, hold=True) == []
    assert machine.is_idle
    [again] = orders(decide(machine))
    assert [again[rank].batches for rank in (0, 1)] == [second[rank].batches for rank in (0, 1)]
    settle(machine, acks(again))
    assert machine.epochs.of(0).is_complete


@pytest.mark.parametrize("wish", ["stop", "pause"])
def test_a_hold_hurries_the_round_that_runs_once(wish: str) -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    assert decide(machine, 5.0, hold=True) == sync_now(0)
    assert decide(machine, 6.0, hold=True) == []
    settle(machine, acks(probe, steps=(1, 1), hurried=True, **{wish: True}))
    assert machine.is_idle


def test_the_next_epoch_follows_without_a_gap() -> None:
    machine = rounds(batches=6, epochs=2)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe))
    [second] = orders(decide(machine))
    assert {order.epoch for order in second.values()} == {1}
    assert decide(machine) == []
    settle(machine, acks(second))
    assert machine.is_idle
    assert machine.epochs.is_exhausted


def test_the_end_of_the_data_shortens_what_is_out() -> None:
    machine = stream(epochs=2)
    [first] = orders(decide(machine))
    assert [first[rank].batches for rank in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    # Batch 3 is the last one: each rank has one that never existed.
    end = DataEnded(0, 4)
    assert ends(machine, 0, 4) == [Send(0, end), Send(1, end)]
    # They come to the gate with their batches so far, and the next armed round is void.
    record = settle(machine, acks(first, steps=(2, 2), hurried=True))
    assert record.steps == (2, 2)
    assert len(machine.epochs.ended(1.0, 1, 4)) == 1
    second, _ = orders(decide(machine))
    assert (second[0].epoch, second[0].batches[:3], sync(second[0]).global_step) == (1, (0, 2, 4), 4)
    assert second[0].plan == first[0].plan + 1


def test_what_a_lost_rank_did_since_the_last_mean_is_dealt_to_the_others() -> None:
    machine = rounds(60, world_size=3, policy="sync")
    [first] = orders(decide(machine))
    settle(machine, acks(first, pace_ms=(1.0, 1.0, 1.0)))
    block, *_ = orders(decide(machine))
    assert sync(block[0]).count > 3
    assert machine.leave(1, 0, 5.0) == []
    # Rounds 1 and 2 of the block were held with it, the third without it.
    record = settle(machine, lost(machine, block, 1, round=3, members=(0, 2)))
    assert (record.steps, record.global_step, record.reason) == ((3, 2, 3), 11, "rank 1 left")
    ledger = machine.epochs.of(0)
    # Its third batch of the block, 3 + 2 * 3 + 1, and all after it.
    assert (ledger.left, ledger.position, ledger.trained) == ([[10], [], []], 12, 11)
    again, *_ = orders(decide(machine))
    assert again.keys() == {0, 2}
    assert again[0].batches[0] == 10
    done = tuple(len(again[rank].batches) if rank in again else 0 for rank in range(3))
    # No wait for the lost rank.
    assert settle(machine, acks(again, steps=done, pace_ms=(1.0, 1.0, 1.0))).steps == done


def test_bad_replicas_are_named_with_their_first_bad_batch() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    answers = [
        SyncAck(
            ack.rank,
            replace(ack.outcome, bad=(1,)),
            replace(ack.work, bad=(0, 3) if ack.rank == 1 else None),
        )
        for ack in acks(probe)
    ]
    record = settle(machine, answers)
    assert machine.pop_bad() == {1: (0, 3)}
    assert record.reason == "rank 1 had NaN or inf parameters"
    assert machine.is_idle
    settle(machine, acks(orders(decide(machine))[0]))
    assert machine.pop_bad() == {}


def test_what_devices_alone_knew_comes_with_the_acknowledgment() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    answers = [
        replace(ack, drift=0.5, work=replace(ack.work, bad=(0, 3) if ack.rank else None))
        for ack in acks(probe)
    ]
    record = settle(machine, answers)
    assert record.drift is None  # the mean is the other replica
    settle(machine, acks(orders(decide(machine))[0]))
    assert machine.pop_bad() == {1: (0, 3)}  # until the coordinator has asked


def test_no_round_is_armed_behind_a_bad_replica_that_overtakes_the_others() -> None:
    machine = rounds(speed_hint=(1, 1.0))
    settle(machine, acks(orders(decide(machine))[0]))
    first, second = orders(decide(machine))
    (a1, b1), (a2, b2) = acks(first), acks(second)
    # Rank 0 had NaN in the second round, and rank 1 has not yet reported the first.
    assert machine.take(a1, 1.0) == machine.take(replace(a2, work=replace(a2.work, bad=(0, 3))), 2.0) == []
    settle(machine, [b1], 3.0)
    assert machine.pop_bad() == {}
    assert decide(machine, 3.0) == []
    settle(machine, [b2], 4.0)
    assert machine.pop_bad() == {0: (0, 3)}
    assert orders(decide(machine, 4.0))


# ---------------------------------------------------------------- one step per rank, and one device
def test_sync_is_one_step_of_every_rank_and_never_hurried() -> None:
    machine = rounds(batches=9, policy="sync")
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
    machine = rounds(batches=1000, policy="sync")
    [probe] = orders(decide(machine))
    settle(machine, acks(probe, pace_ms=(9.0, 5.0)))
    first, _second = orders(decide(machine))
    # 9 ms and 1 ms of averaging.
    assert sync(first[0]).count == ORDER_MS / 10 == 20


def test_a_block_that_is_voided_in_the_middle() -> None:
    machine = rounds(batches=100, policy="sync")
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
    machine = rounds(batches=80, world_size=1, policy="sync")
    [probe] = orders(decide(machine))
    assert probe[0].batches == (0,)
    settle(machine, acks(probe, pace_ms=(5.0,), sync_ms=0.0))
    first, second = orders(decide(machine))
    # 40 steps are 200 ms; such blocks can be cut short.
    assert (sync(first[0]).every, sync(first[0]).count) == (40, 1)
    assert len(second[0].batches) == 39
    assert decide(machine, hold=True) == sync_now(sync(first[0]).round, ranks=1)


def test_sync_with_steps_of_several_batches() -> None:
    machine = rounds(9, policy="sync", groups=(2, 1))
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
    machine = stream(policy="sync", epochs=2)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe))
    block, behind = orders(decide(machine))
    assert sync(block[0]).count > length
    ends(machine, 0, length)
    assert [len(hand) for hand in machine._armed[0].dealt.hands] == [(length + 1) // 2 - 1, length // 2 - 1]
    assert machine._armed[1].dealt.hands == ((), ())
    done = (((length + 1) // 2 - 1), length // 2 - 1)
    settle(machine, acks(block, steps=done, rounds_held=max(done) + (length == 8), hurried=True))
    assert len(machine.epochs.ended(1.0, 1, length)) == 1
    assert behind[0].plan == block[0].plan
    [following, *_] = orders(decide(machine))
    assert (following[0].epoch, following[0].plan) == (1, block[0].plan + 1)


def test_nothing_is_armed_from_the_limit_on() -> None:
    machine = rounds(policy="sync")
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
