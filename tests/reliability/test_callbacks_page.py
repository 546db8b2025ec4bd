"""The code of docs/callbacks.md runs, from the top of the page to its end, and its tables are complete."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp.observe.callbacks import METHODS

PAGE = (Path(__file__).resolve().parents[2] / "docs/callbacks.md").read_text(encoding="utf-8")


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "callbacks.md", "exec"), names)
    with Path("runs/a/metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert {"runs/a/best.pt", "runs/a/metrics.settings.json"} <= {str(one) for one in Path().rglob("*.*")}
    assert capsys.readouterr().out.count("done") == 1
    for name in re.findall(r"`(?:train|eval|run|rank0)/\w+`", PAGE):
        assert name.strip("`") in {*rows[0], "eval/<name>", "train/<name>"}, name


def test_every_method_and_every_callback_is_in_a_table() -> None:
    for method in METHODS:
        assert f"| `{method}(" in PAGE
    for name, one in vars(flowdp).items():
        if isinstance(one, type) and issubclass(one, flowdp.Callback) and one is not flowdp.Callback:
            assert re.search(rf"^\| .*`{name}\(", PAGE, re.MULTILINE), name
