"""Tests of the schedule of comparisons: growing distances, per form of a call and of its outputs."""

from __future__ import annotations

from typing import Any

from flowdp.data_parallel.check_schedule import Schedule, Schedules
from flowdp.data_parallel.layout import Callee
from tests.loops import mlp


def form(*numbers: bool) -> Any:
    return "tree", numbers


def due(schedule: Schedule, forms: list[Any], modes: object = True) -> list[int]:
    """The numbers (from 1) of the calls that are compared, before or after them."""
    found = []
    for number, seen in enumerate(forms, 1):
        is_before = schedule.is_due(modes)
        if is_before | schedule.is_due_after(modes, seen):
            found.append(number)
        schedule.passed(modes)
    return found


def test_calls_are_checked_at_growing_distances() -> None:
    for outputs in (form(True), form(False)):
        assert due(Schedule(Callee(mlp().forward)), [outputs] * 40) == [1, 2, 4, 8, 16, 32]


def test_each_form_of_outputs_has_its_distances() -> None:
    schedule = Schedule(Callee(mlp().forward))
    rows, number = form(False), form(True)
    assert due(schedule, [rows, rows, rows, number, number, rows, number, number]) == [1, 2, 4, 5, 6, 8]


def test_each_mode_has_its_distances() -> None:
    schedule = Schedule(Callee(mlp().forward))
    assert due(schedule, [form(False)] * 4, modes=False) == [1, 2, 4]
    assert due(schedule, [form(False)] * 5, modes=True) == [1, 2, 4]
    assert due(schedule, [form(False)] * 5, modes=False) == [4]


def test_forms_without_end_are_checked_at_growing_distances_too() -> None:
    checked = due(Schedule(Callee(mlp().forward)), [(place, (False,)) for place in range(200)])
    assert checked == [*range(1, 17), 17, 18, 20, 24, 32, 48, 80, 144]
    schedule = Schedule(Callee(mlp().forward))
    assert sum(len(due(schedule, [form(False)], modes)) for modes in range(200)) == 24


def test_a_check_that_failed_is_due_again() -> None:
    schedule = Schedule(Callee(mlp().forward))
    for _ in range(3):
        assert schedule.is_due(True)  # and fails, before the call
    assert due(schedule, [form(False)] * 3) == [1, 2]
    for _ in range(3):
        assert schedule.is_due(True)
    schedule.is_due_after(True, form(False))
    schedule.passed(True)
    assert not schedule.is_due(True)
    assert schedule.is_due_after(True, form(True))  # another form; it fails after the call
    assert schedule.is_due(True)


def test_each_function_has_a_schedule_of_its_own() -> None:
    module = mlp()
    schedules = Schedules(module)
    forward = schedules.of("forward")
    assert forward.callee.name == "Sequential.forward"
    assert schedules.of("forward") is forward
    made = [schedules.of(lambda module: module) for _ in range(2)]  # another object, the same code
    assert made[0] is made[1] is not forward
