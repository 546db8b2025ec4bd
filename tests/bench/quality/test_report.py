"""Tests of the page of the quality table: it says what the record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality import report
from bench.quality.__main__ import RECORD
from bench.quality.rows import ALONE


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


def record(path: Path, losses: dict[tuple[str, str, str], float]) -> Path:
    lines = []
    for (task, mix, row), loss in losses.items():
        for seed in range(5):
            curve = [[1.0, 10, 9.0, 0.1], [2.0, 20, loss + 0.001 * seed, 0.5]]
            lines.append({"task": task, "mix": mix, "row": row, "seed": seed, "curve": curve})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_cell_beyond_the_interval_is_marked(tmp_path: Path) -> None:
    losses = {(task, ALONE.mix, ALONE.name): 1.0 for task in report.TASKS}
    losses |= {(task, "1:1", "exact, batch total"): 1.0 for task in report.TASKS}
    losses |= {(task, "1:1", "sync, batch total"): 1.0 + 0.1 * (task == "gpt") for task in report.TASKS}
    text = report.tables(report.read(record(tmp_path / "record.jsonl", losses)))
    assert "| exact, batch total | +0.0 % | +0.0 % | +0.0 % | yes | 1.00, 1.00, 1.00 |" in text
    assert "| sync, batch total | +0.0 % | **+10.0 %** | +0.0 % | no | 1.00, 1.00, 1.00 |" in text
    assert "cadence" not in text


def test_a_row_that_lacks_a_seed_is_left_out(tmp_path: Path) -> None:
    losses = {(task, ALONE.mix, ALONE.name): 1.0 for task in report.TASKS}
    path = record(tmp_path / "record.jsonl", losses)
    path.write_text(path.read_text().rpartition("\n")[0])
    with pytest.raises(KeyError):
        report.tables(report.read(path))
