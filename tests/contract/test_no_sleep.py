"""No test sleeps: it waits for the thing."""

from __future__ import annotations

import ast
from pathlib import Path

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
