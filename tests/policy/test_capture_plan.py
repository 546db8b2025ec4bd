"""Tests of the plan for a form of step: recorded, compared, recorded again, given up."""

from __future__ import annotations

from itertools import pairwise

from flowdp.policy.capture_plan import FUTILE, PAYS, UNSTEADY, CapturePlan, FormPlan


def recorded(every: int = 500) -> FormPlan:
    form = FormPlan(every)
    while form.next(is_steady=True) != "record":
        pass
    form.recorded()
    return form


def test_two_eager_steps_come_before_a_record() -> None:
    form = FormPlan(500)
    assert [form.next(is_steady=True) for _ in range(4)] == ["eager", "eager", "record", "record"]


def test_nothing_is_recorded_while_steps_change_what_is_watched() -> None:
    form = FormPlan(500)
    assert [form.next(is_steady=False) for _ in range(5)] == ["eager"] * 5
    assert form.next(is_steady=True) == "record"


def test_comparisons_come_at_growing_distances_and_at_least_every_so_often() -> None:
    form = recorded(every=500)
    compared = [n for n in range(1, 2001) if form.next(is_steady=True) == "compare"]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 512, 1000, 1024, 1500, 2000]
    gaps = [later - sooner for sooner, later in pairwise(compared)]
    assert max(gaps) <= 500


def test_one_eager_step_lies_between_a_change_and_the_next_record() -> None:
    form = recorded()
    form.next(is_steady=True)
    form.void()
    assert [form.next(is_steady=True) for _ in range(2)] == ["eager", "record"]


def test_only_so_many_forms_get_a_plan() -> None:
    plan = CapturePlan(2, 500)
    assert plan.add() is not None
    assert plan.add() is not None
    assert plan.add() is None


def test_steps_that_change_what_is_watched_again_and_again_end_it() -> None:
    plan = CapturePlan(2, 500)
    assert not any(plan.stepped(has_changed=True) for _ in range(UNSTEADY - 1))
    assert not plan.is_steady
    assert not plan.stepped(has_changed=False)
    assert plan.is_steady
    assert [plan.stepped(has_changed=True) for _ in range(UNSTEADY)][-1]


def test_graphs_that_serve_few_steps_end_it_and_those_that_serve_many_do_not() -> None:
    for served, ends in ((PAYS - 1, True), (PAYS, False)):
        plan = CapturePlan(2, 10**9)
        form = plan.add()
        assert form is not None
        ended = []
        for _ in range(FUTILE):
            while form.next(is_steady=True) != "record":
                pass
            form.recorded()
            for _ in range(served):
                form.next(is_steady=True)
            ended.append(plan.changed())
        assert ended == [False] * (FUTILE - 1) + [ends]


def test_a_change_makes_the_graphs_of_all_forms_void() -> None:
    plan = CapturePlan(2, 500)
    forms = [plan.add(), plan.add()]
    for form in forms:
        assert form is not None
        while form.next(is_steady=True) != "record":
            pass
        form.recorded()
        form.next(is_steady=True)
    plan.changed()
    assert [form.next(is_steady=True) for form in forms if form is not None] == ["eager", "eager"]
