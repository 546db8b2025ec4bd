"""Tests of the validators of single values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest

from flowdp.errors import OptionError
from flowdp.validators import check_flag, check_fraction, check_function, check_int, check_number, one_of

NUMBERS = [True, "1", None, -1, math.nan, math.inf]  # that are none, or out of range
Row = tuple[Callable[[Any], None], list[Any], list[Any]]
CHECKS: dict[str, Row] = {
    "an int of at least 1": (partial(check_int, "x"), [1], [True, 1.0, "1", None, 0, math.nan]),
    "an int of at least 2 or None": (partial(check_int, "x", least=2, optional=True), [2, None], [1]),
    "a number of at least 0": (partial(check_number, "x", above=False), [0.0, 3], NUMBERS),
    "a number above 0 or None": (partial(check_number, "x", above=True, optional=True), [1, None], [0]),
    "a number above 0 and at most 1": (partial(check_fraction, "x"), [0.1, 1], [0, 1.1, *NUMBERS]),
    "True or False": (partial(check_flag, "x"), [True, False], [None, 1]),
    "True, False or None": (partial(check_flag, "x", optional=True), [True, None], [0]),
    "a function of the step": (partial(check_function, "x", of="the step"), [print, None], [3]),
    "one of 'a', 'b'": (lambda word: one_of("x", word, Literal["a", "b"]), ["a"], ["c", None]),
}


@pytest.mark.parametrize("wanted", CHECKS)
def test_a_value_passes_or_is_named(wanted: str) -> None:
    check, right, wrong = CHECKS[wanted]
    for value in right:
        check(value)
    for value in wrong:
        with pytest.raises(OptionError, match=re.escape(f"x must be {wanted}, not {value!r}")):
            check(value)
