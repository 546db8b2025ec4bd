"""docs/architecture.md shows a run on one page: each line names a function that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^.*\S +([\w/]+\.py) +([\w.]+)$", re.MULTILINE)


def page() -> str:
    """The pseudocode of a run."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return text.split("## A run on one page")[1].split("```")[1]


def is_defined(source: str, name: str) -> bool:
    """Whether a function, or a method of a class, has this dotted name."""
    body: list[ast.stmt] = ast.parse(source).body
    *classes, function = name.split(".")
    for owner in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not found:
            return False
        body = found[0].body
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


@pytest.mark.parametrize(("file", "name"), LINE.findall(page()))
def test_each_line_names_a_function(file: str, name: str) -> None:
    assert is_defined((ROOT / "flowdp" / file).read_text(encoding="utf-8"), name), f"{file} has no {name}"


def test_no_line_is_left_out() -> None:
    lines = [line for line in page().splitlines() if ".py" in line]
    assert len(lines) > 20
    assert len(LINE.findall(page())) == len(lines)
