"""No test sleeps: it waits for the thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sleeps(source: str) -> list[int]:
    """Lines that call or import something named sleep."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "sleep":
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "sleep" for alias in node.names):
            lines.append(node.lineno)
    return lines


def test_no_test_sleeps() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: wait for the thing instead of sleeping"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for line in sleeps(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("from time import sleep as nap\nnap(1)", [1]),
        ("async def f():\n    await anyio.sleep(0)", [2]),
        ("'time.sleep(1)'  # sleep", []),
        ("done.wait(1)", []),
    ],
)
def test_the_rule_bites(source: str, lines: list[int]) -> None:
    assert sleeps(source) == lines
