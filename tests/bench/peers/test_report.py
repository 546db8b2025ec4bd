from __future__ import annotations

import pytest

from bench.harness import ROOT
from bench.peers.report import blocks, newest, written


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_are_those_of_the_newest_record(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert written(text, blocks(newest())[page]) == text, "python -m bench.peers.report writes it anew"
