"""The code of docs/tuning.md runs, from the top of the page to its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flowdp.device.seeding import generators_kept

PAGE = Path(__file__).resolve().parents[2] / "docs/tuning.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    names: dict[str, Any] = {}
    with generators_kept():
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
    assert 1e-3 < names["curve"].suggestion < 1.0
    assert all(run.error is None and run.loss < 1.5 for run in names["found"].runs)
    assert capsys.readouterr().out.endswith("\n0.02\n")
