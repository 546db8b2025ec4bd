"""Tests of cadence rounds: quotas, late rounds and drift."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.machine.cadence_rounds import CadenceRounds
from flowdp.protocol.messages import SyncPoints
from flowdp.protocol.position import Position
from tests.planned import acks, decide, orders, rounds, settle, sync, sync_now


def test_the_first_round_measures_and_nothing_is_armed_behind_it() -> None:
    machine = rounds()
    [block] = orders(decide(machine))
    # Three steps each, in the order in which the ranks will request them.
    assert [block[rank].batches for rank in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    assert sync(block[0]) == SyncPoints(0, 3, 1, 0, 6, drift=True)
    # Nothing is added the second time.
    assert decide(machine) == []


def test_a_late_round_is_hurried_at_its_deadline() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    # The length of the first round is unknown.
    assert machine.deadline_ms() is None
    settle(machine, acks(probe), 30.0)
    decide(machine, 30.0)
    # Predicted 100 ms and 1 ms of averaging, times 1.25.
    assert machine.deadline_ms() == pytest.approx(30.0 + 1.0 + 125.0)
    assert decide(machine, 155.9) == []
    assert decide(machine, 156.1) == sync_now(1)
    # Only once.
    assert machine.deadline_ms() is None
    assert decide(machine, 400.0) == []


def test_an_order_says_what_its_whole_steps_leave_idle() -> None:
    machine = rounds(1000, anchor=4, max_anchor=4)
    [probe] = orders(decide(machine))
    assert [probe[rank].slack_ms for rank in (0, 1)] == [0.0, 0.0]  # speeds are not known
    settle(machine, acks(probe, pace_ms=(10.0, 14.0)))
    [block, _] = orders(decide(machine))
    # Six steps of 10 ms beside four of 14.
    assert [(block[rank].steps, block[rank].slack_ms) for rank in (0, 1)] == [(6, 0.0), (4, 4.0)]
    assert not block[0].guarded
    assert machine.cadence is not None
    machine.cadence.el_che.nudge_anchor_down(0.5)
    settle(machine, acks(block, pace_ms=(10.0, 14.0)))
    [block] = orders(decide(machine))
    assert block[0].guarded


def test_noise_does_not_shorten_short_rounds() -> None:
    machine = rounds()
    [probe] = orders(decide(machine))
    settle(machine, acks(probe, pace_ms=(1.0, 1.0), sync_ms=0.0), 3.0)
    decide(machine, 3.0)
    # A quarter of 10 ms would be less than 20 ms.
    assert machine.deadline_ms() == pytest.approx(3.0 + 10.0 + 20.0)


def test_quotas_are_steps_of_several_batches() -> None:
    machine = rounds(groups=(2, 1), speed_hint=(1, 2.0))
    first, _ = orders(decide(machine))
    assert [(len(first[rank].batches), first[rank].group, first[rank].steps) for rank in (0, 1)] == [
        (40, 2, 20),
        (10, 1, 10),
    ]
    assert [sync(first[rank]).every for rank in (0, 1)] == [20, 10]
    assert sync(first[0]).steps == 30
    # The rest of a late round is given back in whole steps.
    record = settle(machine, acks(first, steps=(5, 10), hurried=True))
    assert (record.global_step, record.reason) == (15, "it took too long and was cut short")
    assert machine.epochs.of(0).trained == 20


def test_drift_is_measured_rarely_where_averaging_is_dear() -> None:
    machine = rounds(batches=1000, max_anchor=10)
    [block] = orders(decide(machine))
    assert sync(block[0]).drift
    wants = []
    ready = [block]
    for _ in range(9):
        settle(machine, acks(ready.pop(0), sync_ms=50.0))
        ready += orders(decide(machine))
    wants = [sync(block[0]).drift for block in ready]
    number = sync(ready[0][0]).round
    assert wants == [round % 4 == 0 for round in range(number, number + len(ready))]


def test_the_quota_of_a_lost_rank_is_none() -> None:
    machine = rounds(100, world_size=3)
    [probe] = orders(decide(machine))
    settle(machine, acks(probe, pace_ms=(10.0, 20.0, 10.0)))
    assert machine.cadence is not None
    machine.leave(1, 0, 0.0)
    assert machine.cadence.quotas[1] == 0
    assert min(machine.cadence.quotas[0], machine.cadence.quotas[2]) >= 1


def test_what_was_measured_goes_on_where_the_ranks_are_as_many() -> None:
    position = Position(2, global_step=40, round=7, anchor=20, pace_ms=(5.0, 10.0))
    machine = rounds()
    machine.resume(position)
    first, _second = orders(decide(machine))
    assert sync(first[0]) == SyncPoints(7, 40, 1, 40, 60, drift=True)
    assert machine.pace_ms == (5.0, 10.0)
    other = rounds(world_size=3)
    other.resume(position)
    [probe] = orders(decide(other))
    assert sync(probe[0]) == SyncPoints(7, 3, 1, 40, 9, drift=True)


# ---------------------------------------------------------------- several machines
def of_machines(batches: int, inner_rounds: int, **options: Any) -> CadenceRounds:
    made = rounds(batches, machines=(1, 1), inner_rounds=inner_rounds, **options)
    assert isinstance(made, CadenceRounds)
    return made


def test_an_order_arms_the_rounds_up_to_one_of_all_machines() -> None:
    machine = of_machines(311, 4, speed_hint=(1, 2.0))
    first, second = orders(decide(machine))
    assert sync(first[0]) == SyncPoints(0, 20, 4, 0, 30, drift=True, inner=True)
    assert [sync(block[1]).every for block in (first, second)] == [10, 10]
    assert [len(block[rank].batches) for block in (first, second) for rank in (0, 1)] == [80, 40] * 2
    settle(machine, acks(first, pace_ms=(10.0, 20.0)))
    # Two rounds are left of the epoch, and less than one: three, that end with one mean of all machines.
    [third] = orders(decide(machine))
    assert [len(third[rank].batches) for rank in (0, 1)] == [48, 23]
    assert sync(third[0]) == SyncPoints(8, 16, 3, 240, 24, drift=True, inner=True)
    assert sync(third[1]) == SyncPoints(8, 8, 3, 240, 24, drift=True, inner=True, short=1)
    settle(machine, acks(second))
    settle(machine, acks(third, steps=(48, 23)))
    assert (machine.global_step, machine.epochs.of(0).is_complete) == (311, True)


@pytest.mark.parametrize(("inner_rounds", "anchor"), [(1, 50), (10, 10)])
def test_a_mean_of_all_machines_counts_once_for_all_rounds(inner_rounds: int, anchor: int) -> None:
    """50 ms in every round of 100 ms are five times too much; once in ten rounds they are cheap."""
    machine = of_machines(10_000, inner_rounds)
    ready = orders(decide(machine))
    for _ in range(3):
        settle(machine, acks(ready.pop(0), sync_ms=50.0))
        ready += orders(decide(machine))
    assert machine.anchor == anchor


def test_the_averaging_of_inner_rounds_counts_too() -> None:
    machine = of_machines(10_000, 10)
    ready = orders(decide(machine))
    for _ in range(3):
        inner_ms = 50.0 * (sync(ready[0][0]).count - 1)
        settle(machine, acks(ready.pop(0), sync_ms=50.0, inner_ms=inner_ms))
        ready += orders(decide(machine))
    assert machine.anchor > 40
    assert machine.times.inner_ms == 50.0
    assert machine.times.sync_ms == 50.0
