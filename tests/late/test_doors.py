"""Loops of the user's, and runs that are cut or steered, on devices that are late."""

from __future__ import annotations

import pytest

from tests.late.doors import DOORS, Door
from tests.late.feeds import FEEDS, WRITTEN
from tests.late.means import MEANS
from tests.late.orders import LATE, Order, first, shuffled


@pytest.mark.parametrize("order", [LATE, shuffled(0), first("compute"), first("default")], ids=str)
@pytest.mark.parametrize("door", [*DOORS, *FEEDS, *MEANS], ids=str)
def test_a_scenario_is_right(door: Door, order: Order) -> None:
    assert door.faults(order) == []


@pytest.mark.xfail(
    strict=False,
    reason="ResidentBatches lets go of tensors that the copy stream of another rank still reads",
)
def test_tensors_that_are_written_in_an_epoch_are_kept_until_they_are_read() -> None:
    assert WRITTEN.faults() == []
