"""Tests of the table in docs/moving.md: it counts the changed lines of the scripts in this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "moving.md"

ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (\d+)(?: \+ (\d+))? \|", re.MULTILINE)


def changed_lines() -> dict[str, int]:
    """For each top-level function of a test file, its lines that end in `# changed`."""
    found: dict[str, int] = {}
    for file in HERE.glob("test_*.py"):
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                own = lines[node.lineno - 1 : node.end_lineno]
                found[node.name] = sum(line.endswith("# changed") for line in own)
    return found


ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_every_script_has_a_row() -> None:
    scripts = {name for name, count in changed_lines().items() if count and not name.startswith("join_")}
    assert {name for name, _, _ in ROWS} == scripts


@pytest.mark.parametrize(("name", "lines", "more"), ROWS, ids=lambda value: value)
def test_the_count_is_right(name: str, lines: str, more: str) -> None:
    counts = changed_lines()
    assert counts[name] == int(lines)
    if more:
        assert counts["join_language"] == int(more)
