"""Scenarios of any kind, and their faults."""

from __future__ import annotations

from tests.late.device import Site
from tests.late.doors import Door
from tests.late.orders import Order
from tests.late.runs import Case, faults_of

__all__ = ["Scenario", "faults_in"]

Scenario = Case | Door


def faults_in(scenario: Scenario, order: Order, removed: frozenset[Site] = frozenset()) -> list[str]:
    """Describe all that is wrong in a scenario.

    Args:
        scenario: The scenario.
        order: Order of the devices' work.
        removed: Waits of flowdp that are left out.
    """
    if isinstance(scenario, Case):
        return faults_of(scenario, order, removed)
    return scenario.faults(order, removed)
