from __future__ import annotations

from typing import Any

import pytest

from bench.harness import ROOT
from bench.peers.report import blocks, newest, ratios, tables, written


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


def test_the_readme_shows_figures_of_a_quiet_machine_only() -> None:
    machine = {"cores": 4, "cpu": "x"}
    versions = {"torch": "2", "lightning": "2", "accelerate": "1"}
    record = {**RECORD, "machine": machine, "versions": versions, "date": "2026-11-23", "commit": "abc"}
    quiet, busy = (blocks({**record, "load": load}) for load in (2.4, 8.0))
    assert "| flowdp exact | 2.50 | - | - | - | 2.0 | - | - |" in quiet["README.md"].splitlines()
    assert "Other programs" not in quiet["docs/performance.md"]
    assert "|" not in busy["README.md"]
    assert "Other programs ran beside it** (load 8.0 on 4 cores)" in busy["docs/performance.md"]
