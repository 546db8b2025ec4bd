"""The code of three pages runs, each from the top of its page to the end, and says what the page says."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp.device.draws import generators_kept
from flowdp.observe.callbacks import METHODS
from tests.docs.programs import programs

DOCS = Path(__file__).resolve().parents[2] / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def run(page: str, folder: Path) -> dict[str, Any]:
    """The names that the program of a page has made."""
    [program] = programs(f"docs/{page}")
    script = folder / "train.py"
    script.write_text(program.code, encoding="utf-8")
    with generators_kept():
        torch.manual_seed(0)
        return runpy.run_path(str(script), run_name="__main__")


def test_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("callbacks.md", tmp_path)
    with Path("runs/a/metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert {"runs/a/best.pt", "runs/a/metrics.settings.json"} <= {str(one) for one in Path().rglob("*.*")}
    assert capsys.readouterr().out.count("done") == 1
    for name in re.findall(r"`(?:train|eval|run|rank0)/\w+`", text_of("callbacks.md")):
        assert name.strip("`") in {*rows[0], "eval/<name>", "train/<name>"}, name


def test_every_method_and_every_callback_is_in_a_table() -> None:
    page = text_of("callbacks.md")
    for method in METHODS:
        assert f"| `{method}(" in page
    for name in flowdp.__all__:
        one = getattr(flowdp, name)
        if isinstance(one, type) and issubclass(one, flowdp.Callback) and one is not flowdp.Callback:
            assert re.search(rf"^\| .*`{name}\(", page, re.MULTILINE), name


def test_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    names = run("tuning.md", tmp_path)
    assert 1e-3 < names["curve"].suggestion < 1.0
    assert all(run.error is None and run.loss < 1.5 for run in names["found"].runs)
    assert capsys.readouterr().out.endswith("\n0.02\n")


def test_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    names = run("evaluation.md", tmp_path)
    assert names["confusion"].sum() == len(names["held_out"][0])
