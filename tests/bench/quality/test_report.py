"""Tests of the page of the quality table: it says what the record says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality import report
from bench.quality.__main__ import RECORD
from tests.bench.svg import texts


def test_the_page_is_that_of_the_record() -> None:
    _, _, rest = report.PAGE.read_text().partition(report.BEGIN)
    table, _, _ = rest.partition(report.END)
    assert table.strip() == report.tables(report.read(RECORD)).strip()


def test_the_default_is_the_only_row_that_keeps_the_loss_everywhere() -> None:
    kept: dict[str, int] = {}
    for line in report.tables(report.read(RECORD)).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-2:-1] == ["yes"]:
            kept[cells[0]] = kept.get(cells[0], 0) + 1
    assert [row for row, mixes in kept.items() if mixes == 3] == ["exact, batch total"]


def test_the_curves_are_those_of_the_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'flowdp[dev]'")
    report.figure(report.read(RECORD)).savefig(tmp_path / "quality.svg")
    assert texts(report.PICTURE) == texts(tmp_path / "quality.svg"), (
        "python -m bench.quality --report draws it"
    )
