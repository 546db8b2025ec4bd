"""Tests of tables: aligned text, and HTML that holds hostile text as text."""

from __future__ import annotations

from flowdp.policy.table import Table


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
