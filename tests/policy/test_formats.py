"""Tests of numbers, errors and tables as text; in HTML hostile text is text."""

from __future__ import annotations

import math

import pytest

from flowdp.policy.formats import (
    Table,
    format_duration,
    format_epochs,
    format_error,
    format_indices,
    format_metric,
)


def test_epochs():
    assert [format_epochs(count) for count in (0, 1, 2)] == ["0 epochs", "1 epoch", "2 epochs"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0, "0ms"),
        (420.0, "420ms"),
        (999.4, "999ms"),
        (999.6, "1.0s"),
        (1234.0, "1.2s"),
        (59_940.0, "59.9s"),
        (59_960.0, "1m 00s"),
        (272_000.0, "4m 32s"),
        (3_599_600.0, "1h 00m"),
        (11_520_000.0, "3h 12m"),
        (360_000_000.0, "100h 00m"),
    ],
)
def test_durations(ms, text):
    assert format_duration(ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.000999, "9.99e-4"),
        (-1.5e-12, "-1.50e-12"),
        (0.001, "0.0010"),
        (0.41234, "0.4123"),
        (-99.5, "-99.5000"),
        (100.0, "100.00"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_metrics(value, text):
    assert format_metric(value) == text


def test_indices_are_cut_after_eight() -> None:
    assert format_indices([]) == ""
    assert format_indices(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert format_indices(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ..."


class Mute(Exception):
    def __str__(self):
        raise self.args[0]


@pytest.mark.parametrize("raised", [ValueError("boom"), SystemExit(3)])
def test_an_error_without_a_text(raised):
    assert format_error(ValueError("boom")) == "ValueError: boom"
    assert format_error(MemoryError()) == "MemoryError"
    assert format_error(Mute(raised)) == f"Mute: (no text: its __str__ raised {type(raised).__name__})"


def test_ctrl_c_while_an_error_is_told():
    with pytest.raises(KeyboardInterrupt):
        format_error(Mute(KeyboardInterrupt()))


def test_columns_are_aligned() -> None:
    table = Table(("run", "loss"), [("sync", "0.5"), ("a\nlonger", "12.25")])
    assert str(table).splitlines() == [
        "run        loss",
        "sync        0.5",
        "a longer  12.25",
    ]


def test_cells_are_escaped_in_html() -> None:
    html = Table(("a",), [("<script>x</script>&",)])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;x&lt;/script&gt;&amp;" in html
