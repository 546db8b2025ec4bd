from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import ROOT
from bench.peers.report import blocks, draw, newest, written
from tests.bench.svg import texts


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_are_those_of_the_newest_record(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert written(text, blocks(newest())[page]) == text, "python -m bench.peers.report writes it anew"


def test_the_bars_are_those_of_the_newest_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'flowdp[dev]'")
    record = newest()
    assert record is not None
    draw(record, tmp_path)
    for name in ("peers-light.svg", "peers-dark.svg"):
        assert texts(ROOT / "docs/images" / name) == texts(tmp_path / name), (
            "python -m bench.peers.report draws it"
        )
