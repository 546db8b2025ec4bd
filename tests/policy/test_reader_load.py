from __future__ import annotations

import pytest

from flowdp.policy.reader_load import LOOK_S, MUCH, ReaderLoad


def test_much_reading_is_told_once() -> None:
    load = ReaderLoad(5.0, 1.0)
    assert load.passed(5.0 + LOOK_S - 0.1, 1.0 + LOOK_S) is None  # too early
    assert load.passed(5.0 + LOOK_S, 1.0 + 0.5 * LOOK_S) == pytest.approx(0.5)
    assert load.passed(5.0 + 3 * LOOK_S, 1.0 + 2 * LOOK_S) is None


def test_little_reading_is_not_told_and_each_look_begins_anew() -> None:
    load = ReaderLoad(0.0, 0.0)
    assert load.passed(LOOK_S, 0.9 * MUCH * LOOK_S) is None
    assert load.passed(1.5 * LOOK_S, 0.9 * MUCH * LOOK_S + LOOK_S) is None
    assert load.passed(2 * LOOK_S, 0.9 * MUCH * LOOK_S + MUCH * LOOK_S) == pytest.approx(MUCH)
