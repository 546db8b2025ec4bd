"""Tests of messages: frozen values without tensors."""

from __future__ import annotations

import copy
import pickle
import typing
from dataclasses import FrozenInstanceError, is_dataclass

import pytest

from flowdp.protocol import messages
from flowdp.protocol.commands import Command
from flowdp.protocol.messages import Fact, Order, StartEpoch, SyncPoints

RECORDS = [value for value in vars(messages).values() if isinstance(value, type) and is_dataclass(value)]

OWN = messages.Arrival, messages.Window
"""A rank makes these anew in every round, and writes to them until it stands in the gate."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_message_is_frozen_and_small(record: type) -> None:
    assert record.__dataclass_params__.frozen == (record not in OWN)  # type: ignore[attr-defined]
    assert "__slots__" in vars(record)
    assert record.__doc__ is not None
    assert record.__name__ in messages.__all__ or record.__module__ != messages.__name__


def test_equal_messages_are_equal_values() -> None:
    first, second = (StartEpoch(0, 1, (2, 3), SyncPoints(4, 2, 1, 0, 4)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != StartEpoch(0, 1, (2, 3))
    assert copy.deepcopy(first) == first
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(FrozenInstanceError):
        first.epoch = 2  # type: ignore[misc]


def test_the_unions_hold_each_message_once() -> None:
    for union in (Order, Fact, Command):
        members = typing.get_args(union)
        assert len(set(members)) == len(members) > 1
        assert all(is_dataclass(member) for member in members)
    assert not set(typing.get_args(Fact)) & set(typing.get_args(Command))


def test_an_order_says_how_many_steps_it_is() -> None:
    assert StartEpoch(0, 0, (0, 1, 2)).steps == 3
    assert StartEpoch(0, 0, (0, 1, 2), group=2).steps == 2
    assert StartEpoch(0, 0, (), group=2).steps == 0


def test_duties_are_orders_and_their_answers_are_facts() -> None:
    orders = (
        messages.Evaluate(2, 1),
        messages.SaveState(0, 1),
        messages.CopyReplica(3),
    )
    for order in orders:
        assert isinstance(order, messages.Order)
        assert isinstance(order, messages.BarrierTask)
    facts = (
        messages.TaskDone(0, ()),
        messages.TaskDone(1),
    )
    for fact in facts:
        assert isinstance(fact, messages.Fact)
