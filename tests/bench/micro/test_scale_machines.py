"""The bench of several machines: the numbers of its cells."""

from __future__ import annotations

import pytest

from bench.micro.scale_machines import point


def test_a_mean_of_all_in_every_round_costs_its_time() -> None:
    one = point(2, 1, overlap=False)
    # 25 MB in two halves over 1 Gbit/s; a round has 100 ms of steps.
    assert one.mean_ms == pytest.approx(201.0)
    assert one.efficiency == pytest.approx(100 / 301, rel=0.02)


def test_a_mean_that_travels_and_is_rare_costs_little() -> None:
    one = point(2, 10, overlap=True)
    assert one.efficiency > 0.97
    assert one.mbit < point(2, 1, overlap=True).mbit
