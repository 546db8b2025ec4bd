"""Tests of the messages of barrier tasks."""

from __future__ import annotations

import dataclasses

import pytest

from flowdp.machine.event_log import decode, encode
from flowdp.protocol import messages, tasks


def test_duties_are_orders_and_their_answers_are_facts() -> None:
    orders = (tasks.Evaluate(2, 1), tasks.MergeMetrics(1), tasks.SaveState(0, 1), tasks.CopyReplica(3))
    for order in orders:
        assert isinstance(order, messages.Order)
        assert isinstance(order, tasks.BarrierTask)
    facts = (tasks.Evaluated(0, ()), tasks.MetricsMerged(0, ()), tasks.StateSaved(1), tasks.ReplicaCopied(2))
    for fact in facts:
        assert isinstance(fact, messages.Fact)


@pytest.mark.parametrize(
    "said",
    [
        tasks.Evaluate(2, 1),
        tasks.Evaluated(1, ((0, 8.0, (("loss", float("inf")),)),)),
        tasks.MergeMetrics(3),
        tasks.MetricsMerged(0, ((9, 1.0, (("f1", 0.5),)),)),
        tasks.SaveState(4),
    ],
)
def test_they_stand_in_an_event_log_and_cannot_be_changed(said: object) -> None:
    assert decode(encode(said)) == said
    assert dataclasses.is_dataclass(said)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(said, dataclasses.fields(said)[0].name, 7)
