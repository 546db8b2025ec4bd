"""Runs of the Trainer on devices that are late: plain PyTorch's numbers, or what async promises."""

from __future__ import annotations

import pytest

from tests.late.cases import EXTRA, Row, all_of, case_of, pairwise
from tests.late.orders import LATE, Order, shuffled
from tests.late.runs import Case, faults_of


@pytest.mark.parametrize(
    "row", pairwise(list(all_of((0,)))), ids=lambda row: " ".join(map(str, case_of(row)))
)
def test_a_run_is_right(row: Row) -> None:
    assert faults_of(*case_of(row)) == []


@pytest.mark.parametrize(
    ("case", "order"), [(case, shuffled(2) if turn % 2 else LATE) for turn, case in enumerate(EXTRA)], ids=str
)
def test_a_run_with_one_thing_more_is_right(case: Case, order: Order) -> None:
    assert faults_of(case, order) == []
