"""Tests of the coordinator's record of a rank: orders and steps agree."""

from __future__ import annotations

import pytest

from flowdp.errors import ProtocolError
from flowdp.machine.async_rank import AHEAD, AsyncRank, RankIndex
from flowdp.protocol.messages import DataEnded, StartEpoch, StepsDone, Work


def test_what_was_not_trained_is_not_dealt_any_more() -> None:
    state = AsyncRank(limit=2)
    order = StartEpoch(0, 0, (0, 1, 2))
    state.give(order)
    assert (state.dealt, state.reach) == (3, 2)
    state.credit(state.orders.popleft(), Work(0, 2, 16, pace_ms=5.0))
    assert (state.dealt, state.trained, state.pace_ms) == (2, 2, 5.0)
    state.credit(order, Work(0, 3, 24))
    assert state.pace_ms == 5.0  # nothing measured: the pace stays
    assert [work.steps for work in state.works] == [2, 3]


def test_the_end_of_an_epoch_shortens_its_orders_alone() -> None:
    state = AsyncRank()
    state.give(StartEpoch(0, 3, (7, 9)))
    state.give(StartEpoch(0, 4, (8,)))
    assert not state.shorten(DataEnded(2, 1))
    assert not state.shorten(DataEnded(3, 10))
    assert state.shorten(DataEnded(3, 9))
    assert [order.batches for order in state.orders] == [(7,), (8,)]
    # An empty order stays, to be answered.
    assert state.shorten(DataEnded(4, 8))
    assert [order.batches for order in state.orders] == [(7,), ()]
    assert state.dealt == 1
    state.check()


def test_steps_of_several_batches_are_counted_as_steps() -> None:
    state = AsyncRank()
    state.give(StartEpoch(0, 0, (0, 1, 2, 3, 4), group=2))
    assert state.dealt == 3
    # The last step has one batch less than possible, and is then cut to nothing.
    assert state.shorten(DataEnded(0, 4))
    assert state.shorten(DataEnded(0, 3))
    assert state.dealt == 2
    state.credit(state.orders.popleft(), Work(0, 1, 16))
    assert (state.dealt, state.trained) == (1, 1)


def test_counts_that_cannot_be() -> None:
    state = AsyncRank(trained=1)
    with pytest.raises(ProtocolError, match="counts out of order"):
        state.check()
    state = AsyncRank()
    for number in range(AHEAD + 1):
        state.give(StartEpoch(0, 0, (number,)))
    with pytest.raises(ProtocolError, match="3 orders are out, 2 may be"):
        state.check()


def test_a_report_is_about_the_oldest_batches() -> None:
    state = AsyncRank()
    state.give(StartEpoch(0, 0, (0, 1, 2, 3, 4), group=2))
    part = state.reported(StepsDone(0, 0, Work(0, 1, 16), is_last=False))
    assert (part.batches, state.orders[0].batches) == ((0, 1), (2, 3, 4))
    # The last report may have fewer steps than are left, if the order was cut short.
    assert state.reported(StepsDone(0, 0, Work(0, 1, 16))).batches == (2, 3, 4)
    assert not state.orders
    with pytest.raises(ProtocolError, match="the oldest order is None"):
        state.reported(StepsDone(0, 0, Work(0, 1, 16)))


def test_the_index_follows_a_rank() -> None:
    states = [AsyncRank(), AsyncRank(limit=1)]
    index = RankIndex(states)
    assert index.changed == {0, 1}  # none was asked yet
    index.changed.clear()
    for rank, state in enumerate(states):
        state.give(StartEpoch(0, 0, (0, 1, 2)))
        index.sort(rank, 2)
    assert (index.out, index.short, index.held, index.changed) == ({0, 1}, {0, 1}, {1}, set())
    states[0].credit(states[0].reported(StepsDone(0, 0, Work(0, 2, 16), is_last=False)), Work(0, 2, 16))
    index.change(0, 2)
    assert (index.out, index.short, index.held, index.changed) == ({0, 1}, {1}, {1}, {0})
    index.sort(0, 3)  # the counts have changed
    assert index.short == {0, 1}
    states[1].credit(states[1].reported(StepsDone(1, 0, Work(0, 3, 24))), Work(0, 3, 24))
    index.change(1, 3)
    assert (index.out, index.short, index.held, index.changed) == ({0}, {0}, set(), {0, 1})
