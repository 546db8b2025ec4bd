"""Loops of the user's, and runs that are cut or steered, on devices that are late."""

from __future__ import annotations

import pytest

from tests.late.doors import DOORS, Door
from tests.late.feeds import FEEDS
from tests.late.means import MEANS
from tests.late.orders import LATE, Order, first, shuffled

ALL = [*DOORS, *FEEDS, *MEANS]
IN_TURN = [shuffled(0), first("compute"), first("default")]


@pytest.mark.parametrize(
    ("door", "order"),
    [(door, order) for turn, door in enumerate(ALL) for order in (LATE, IN_TURN[turn % 3])],
    ids=str,
)
def test_a_scenario_is_right(door: Door, order: Order) -> None:
    assert door.faults(order) == []
