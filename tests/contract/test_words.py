"""Docstrings begin with a noun or a verb, and no name is a word that this project has given up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "flowdp").rglob("*.py"))

NO_BEGINNING = {
    *("as", "from", "how", "in", "it", "its", "nobody", "of", "somebody", "what", "when", "where"),
    *("which", "who", "whoever", "whom", "whose"),
}

# The field's word stands behind each.
RETIRED = {
    "adoption": "optimizer_copy",
    "assembly": "build",
    "care": "process options",
    "duties": "barrier tasks",
    "duty": "barrier task",
    "hurry": "SyncNow",
    "intake": "micro-batches",
    "recipe": "factories",
    "standstill": "barrier",
    "story": "event log",
    "untold": "unreported_samples",
    "upkeep": "configuration",
    "witness": "diagnostics",
}

Named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first word of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Named) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text.split(maxsplit=1)[0].strip("`:,.").lower()


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every definition, argument, variable and attribute that is assigned."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def offences(tree: ast.AST) -> list[str]:
    """Lines whose docstring begins with no noun or verb, or whose name is retired."""
    found = [f"{line}: begins with {word!r}" for line, word in docstrings(tree) if word in NO_BEGINNING]
    for line, name in names(tree):
        word = name.strip("_").lower()
        if word in RETIRED:
            found.append(f"{line}: {name}, which is called {RETIRED[word]} here")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words(path: Path) -> None:
    assert path.stem not in RETIRED
    assert offences(ast.parse(path.read_text())) == []
