"""The pictures of README and docs are not older than what they show."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pictures() -> Any:
    """The program that makes them."""
    for module in ("sklearn", "PIL", "tqdm"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'flowdp[browser]'")
    from docs import pictures

    return pictures


def test_no_picture_is_older_than_what_it_shows(pictures: Any) -> None:
    assert pictures.outdated() == [], "make pictures, and look at them"


def test_every_screenshot_has_a_stamp(pictures: Any) -> None:
    assert {file.name for file in (ROOT / "docs/images").glob("*.png")} == pictures.outputs().keys()


def test_a_change_of_the_output_makes_its_picture_old(pictures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.bar, "FORMAT", "another bar")
    assert pictures.outdated() == ["terminal.png"]


def test_a_picture_without_a_stamp_is_old(pictures: Any, tmp_path: Path) -> None:
    from PIL import Image

    for file in (ROOT / "docs/images").glob("*.png"):
        shutil.copy(file, tmp_path)
    Image.new("RGB", (2, 2)).save(tmp_path / "dashboard.png")
    (tmp_path / "page-dark.png").unlink()
    assert pictures.outdated(tmp_path) == ["page-dark.png", "dashboard.png"]
