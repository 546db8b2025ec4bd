"""Tests of the messages of barrier tasks."""

from __future__ import annotations

from flowdp.protocol import messages, tasks


def test_duties_are_orders_and_their_answers_are_facts() -> None:
    orders = (tasks.Evaluate(2, 1), tasks.MergeMetrics(1), tasks.SaveState(0, 1), tasks.CopyReplica(3))
    for order in orders:
        assert isinstance(order, messages.Order)
        assert isinstance(order, tasks.BarrierTask)
    facts = (tasks.Evaluated(0, ()), tasks.MetricsMerged(0, ()), tasks.StateSaved(1), tasks.ReplicaCopied(2))
    for fact in facts:
        assert isinstance(fact, messages.Fact)
