from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import ROOT
from bench.peers.report import BEGIN, END, blocks, draw, newest, ratios, tables, written


def run(turn: int, side: str, rate: float, kind: str = "equal", model: str = "mlp") -> dict[str, Any]:
    return {"turn": turn, "kind": kind, "model": model, "side": side, "rate": rate, "first_step_s": 2.0}


RECORD = {
    "rounds": 3,
    "wait_us": {"cnn": 100.0},
    "runs": [
        run(0, "ddp", 100.0),
        run(0, "exact", 300.0),
        run(1, "ddp", 200.0),
        run(1, "exact", 400.0),
        run(2, "exact", 1000.0),  # DDP's run of this round is missing
        {"turn": 0, "kind": "failure", "model": "cnn", "side": "ddp", "peak_mb": 800.0, "left": 1},
    ],
}


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_are_those_of_the_newest_record(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert written(text, blocks(newest())[page]) == text, "python -m bench.peers.report writes it anew"


def test_a_ratio_is_of_one_round() -> None:
    assert ratios(RECORD, "equal", "mlp", "exact", "ddp") == [3.0, 2.0]


def test_the_tables_have_medians_and_spread_and_mark_other_mathematics() -> None:
    lines = tables({**RECORD, "runs": [*RECORD["runs"], run(0, "cadence", 500.0)]}).splitlines()  # type: ignore[misc]
    assert "| flowdp exact | 400 (300-1,000) | 2.50 (2.00-3.00) | 2.0 (2.0-2.0) |" in lines
    assert "| flowdp cadence * | 500 | 5.00 | 2.0 |" in lines
    assert "| DistributedDataParallel | 800 | - | - | 1 |" in lines


def test_runs_that_ended_with_an_error_behind_their_last_step_are_named() -> None:
    aborted = [{**run(turn, "accelerate", 90.0), "aborted": True} for turn in range(2)]
    told = "Runs whose program ended with an error behind its last step, which count: Accelerate 2."
    assert tables({**RECORD, "runs": [*RECORD["runs"], *aborted]}).endswith(told)  # type: ignore[misc]
    assert "which count" not in tables(RECORD)


def test_the_readme_shows_figures_of_a_quiet_machine_only() -> None:
    machine = {"cores": 4, "cpu": "x"}
    versions = {"torch": "2", "lightning": "2", "accelerate": "1"}
    record = {**RECORD, "machine": machine, "versions": versions, "date": "2026-11-23", "commit": "abc"}
    quiet, busy = (blocks({**record, "load": load}) for load in (2.4, 8.0))
    assert "| flowdp exact | 2.50 | - | - | - | 2.0 | - | - |" in quiet["README.md"].splitlines()
    assert "Other programs" not in quiet["docs/performance.md"]
    assert "|" not in busy["README.md"]
    assert "Other programs ran beside it** (load 8.0 on 4 cores)" in busy["docs/performance.md"]


def test_a_page_without_its_marks_is_not_written() -> None:
    assert written(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    for page in ("a", f"{END} {BEGIN}", f"{BEGIN} {END} {BEGIN} {END}"):
        with pytest.raises(ValueError, match="needs one"):
            written(page, "new")


def test_the_newest_record_is_the_last_by_date(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    days = {"a": ("2026-11-24", "T10"), "b": ("2026-11-20", "T12"), "c": ("2026-11-24", "T09")}
    for name, (date, ended) in days.items():
        (tmp_path / f"peers_{name}.json").write_text(json.dumps({"date": date, "ended": ended}))
    assert newest(tmp_path) == {"date": "2026-11-24", "ended": "T10"}


def test_the_plot_is_the_same_again(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        draw(RECORD, tmp_path / folder)
    for theme in ("light", "dark"):
        first, second = ((tmp_path / folder / f"peers-{theme}.svg").read_text() for folder in ("a", "b"))
        assert first == second
        assert "flowdp exact" in first
