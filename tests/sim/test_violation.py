"""A violation names its rule, for the mutants to be found by."""

from __future__ import annotations

from flowdp.sim.violation import Violation


def test_it_names_the_rule() -> None:
    violation = Violation("S1", "batch 3 was trained twice")
    assert violation.rule == "S1"
    assert str(violation) == "S1: batch 3 was trained twice"
