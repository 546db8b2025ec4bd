"""Tests of the validators of single values."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from flowdp.errors import OptionError
from flowdp.validators import check_flag, check_function, check_int, check_number, is_int, is_number, one_of


def test_values_of_the_right_kind_pass() -> None:
    check_int("x", 1)
    check_int("x", 0, least=0)
    check_int("x", None, optional=True)
    check_number("x", 0.0, above=False)
    check_number("x", 1, above=True)
    check_number("x", None, above=True, optional=True)
    check_flag("x", False)
    check_flag("x", None, optional=True)
    check_function("x", print, "nothing")
    check_function("x", None, "nothing")
    one_of("x", "a", Literal["a", "b"])


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, math.nan])
def test_an_int_is_an_int_and_at_least_the_least(value: Any) -> None:
    with pytest.raises(OptionError, match="x must be an int of at least 1, not "):
        check_int("x", value)


@pytest.mark.parametrize("value", [True, "1", None, -1, math.nan, math.inf])
def test_a_number_is_finite_and_not_below_0(value: Any) -> None:
    with pytest.raises(OptionError, match="x must be a number of at least 0, not "):
        check_number("x", value, above=False)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: check_number("x", 0, above=True), "x must be a number above 0, not 0"),
        (lambda: check_flag("x", None), "x must be True or False, not None"),
        (lambda: check_flag("x", 1, optional=True), "x must be True, False or None, not 1"),
        (lambda: check_int("x", 1, least=2, optional=True), "x must be an int of at least 2 or None, not 1"),
        (lambda: check_function("x", 3, "the step"), "x must be a function of the step, not 3"),
        (lambda: one_of("x", "c", Literal["a", "b"]), "x must be one of 'a', 'b', not 'c'"),
    ],
)
def test_other_values_are_named(check: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check()


def test_a_bool_is_no_number() -> None:
    assert not is_int(True)
    assert not is_number(False)
    assert is_int(3)
    assert is_number(3.5)
    assert not is_number(math.inf)
