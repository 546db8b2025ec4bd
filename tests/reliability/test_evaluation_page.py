"""The code of docs/evaluation.md runs, from the top of the page to its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vision import mend_torchvision

PAGE = Path(__file__).resolve().parents[2] / "docs/evaluation.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    mend_torchvision()
    pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["confusion"].sum() == len(names["held_out"][0])
