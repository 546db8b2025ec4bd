"""Loops of the user's, and runs that are cut or steered, on devices that are late."""

from __future__ import annotations

import pytest

from tests.late.doors import DOORS, Door
from tests.late.feeds import FEEDS, FREED
from tests.late.means import MEANS
from tests.late.orders import LATE, Order, first, shuffled


@pytest.mark.parametrize("order", [LATE, shuffled(0), first("compute"), first("default")], ids=str)
@pytest.mark.parametrize("door", [*DOORS, *FEEDS, *MEANS], ids=str)
def test_a_scenario_is_right(door: Door, order: Order) -> None:
    assert door.faults(order) == []


@pytest.mark.xfail(
    strict=False,
    reason="ResidentBatches does not tell the allocator which copy streams read the tensors of the dataset",
)
@pytest.mark.parametrize("door", FREED, ids=str)
def test_tensors_of_a_loader_are_kept_until_they_are_read(door: Door) -> None:
    assert door.faults() == []
