"""Mistakes in the step of spans that runs on late devices show, each in one order at least."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import Lane
from flowdp.replica.exact_replica import ExactReplica
from flowdp.replica.flat_optimizer import FlatOptimizer
from flowdp.replica.update import Update
from tests.late.edges import edges
from tests.late.orders import LATE, first
from tests.late.runs import Case
from tests.late.test_edges import is_wrong, quiet

__all__ = ["quiet"]

ORDERS = (LATE, first("compute"), first("comm"))
CASES = [Case("exact", "local", (0, 0)), Case("exact", "local", (0, 1)), Case("exact", "nccl", (0, 1))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_owner_that_steps_before_its_sum_is_there(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    step, own_span, lanes = Update.step_span, ExactReplica.own_span, dict[Update, Lane]()

    def noted(replica: ExactReplica) -> FlatOptimizer:
        lanes[replica.update] = replica.lane
        return own_span(replica)

    def early(update: Update, touched: Sequence[bool]) -> None:
        with lanes[update].on(lanes[update].compute):
            step(update, touched)

    monkeypatch.setattr(ExactReplica, "own_span", noted)
    monkeypatch.setattr(Update, "step_span", early)
    assert any(is_wrong((case, order), frozenset()) for order in ORDERS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_forward_that_begins_before_the_new_values_are_there(case: Case) -> None:
    average = "collective/on_streams.py StreamedMean.average: "
    [edge] = [sites for name, sites in edges().items() if name.startswith(average)]
    assert any(is_wrong((case, order), edge) for order in ORDERS)


@pytest.mark.parametrize("owned", [(0, 0), (1, 1)], ids=str)
def test_a_span_with_two_owners_and_one_with_none(
    owned: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = Flat.span
    monkeypatch.setattr(Flat, "span", lambda flat, rank: span(flat, owned[rank] if flat.spans > 1 else rank))
    assert is_wrong((CASES[1], LATE), frozenset())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_mistake_nothing_is_wrong(case: Case) -> None:
    assert not any(is_wrong((case, order), frozenset()) for order in ORDERS)
