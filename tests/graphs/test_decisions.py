"""Tests of the decisions about recorded work: eager, recorded, compared, recorded again, given up."""

from __future__ import annotations

from typing import Any

import pytest

from flowdp.graphs.base import NotCaptured
from flowdp.graphs.decisions import Decisions, Form
from flowdp.options import CaptureOptions
from flowdp.policy.worth import FUTILE, PAYS, WATCHED, LaunchWatch


class Guards:
    """What is watched, as the test says."""

    change: str | None = None

    def changed(self) -> str | None:
        change, self.change = self.change, None
        return change

    def retake(self) -> None: ...


class Work:
    """Decisions about work of one form."""

    def __init__(self, watch: LaunchWatch | None = None, **options: Any) -> None:
        self.guards, self.told = Guards(), list[str]()
        guard: Any = lambda: self.guards  # noqa: E731

        def tell(text: str, *, is_shown: bool = False) -> None:
            self.told.append(text)

        self.own: Decisions[str] = Decisions("step", CaptureOptions(**options), guard, tell, watch)

    def form(self, *specs: Any) -> Form[str]:
        form = self.own.form(specs, None)
        assert form is not None
        return form

    def run(self, count: int) -> list[str]:
        """The actions of so many steps."""
        assert self.own.begins("cuda:0")
        return [self.own.next(self.form(), lambda: "graph") for _ in range(count) if self.own.ended is None]


def test_two_eager_steps_come_before_a_record_which_is_compared() -> None:
    assert Work().run(7) == ["eager", "eager", "compare", "compare", "run", "compare", "run"]


def test_comparisons_come_at_growing_distances_and_at_least_every_so_often() -> None:
    compared = [number for number, action in enumerate(Work().run(1502), -1) if action == "compare"]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 512, 1000, 1024, 1500]
    assert Work(compare_every=7).run(30)[-7:].count("compare") == 1


def test_one_eager_step_lies_between_a_change_and_the_next_record() -> None:
    work = Work()
    work.run(5)
    work.guards.change = "beta"
    assert work.run(4) == ["eager", "eager", "compare", "compare"]
    assert work.told == ["beta; the step is captured anew"]


@pytest.mark.parametrize(("steps", "ends"), [(1, True), (PAYS // 2, True), (PAYS + 2, False)])
def test_a_state_that_changes_too_often_ends_it(steps: int, ends: bool) -> None:
    work = Work()
    for _ in range(FUTILE):
        work.run(steps)
        work.guards.change = "beta"
    work.run(1)
    assert (work.own.ended is not None) is ends
    assert not ends or "changes too often, the last time: beta" in str(work.own.ended)


def test_only_so_many_forms_get_a_graph_and_each_has_its_own() -> None:
    work = Work(graphs=2)
    forms = [work.form(1), work.form(2)]
    assert work.own.form((3,), None) is None
    assert work.form(1) is forms[0]
    assert "more than 2 forms" in work.told[0]


def test_what_cannot_be_recorded_or_differs_ends_it() -> None:
    def refused() -> str:
        raise NotCaptured("it reads a value")

    work = Work()
    work.run(2)
    assert work.own.next(work.form(), refused) == "eager"
    assert work.own.ended == work.own.problem == "it reads a value"
    work = Work(LaunchWatch())
    work.own.check("")
    assert work.own.ended is None
    work.own.check("the loss differs by 1")
    assert (
        work.own.ended
        == work.own.problem
        == "a captured step differs from an eager one: the loss differs by 1"
    )


@pytest.mark.parametrize("device_ms", [1.0, 2.0])
def test_it_begins_where_the_device_waits(device_ms: float) -> None:
    watch = LaunchWatch()
    work = Work(watch)
    assert not work.own.begins("cuda:0")
    for _ in range(WATCHED):
        watch.take(1.0, device_ms)
    assert work.own.begins("cuda:0") is (device_ms == 1.0)
    assert (work.own.ended is None) is (device_ms == 1.0)
    assert work.own.problem is None
