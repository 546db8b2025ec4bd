"""The places in flowdp's source that order the work of streams, found by their calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import flowdp
from tests.late.device import Site

__all__ = ["edges"]

PACKAGE = Path(flowdp.__file__).parent  # as frames have it

METHODS = {"wait_event", "await_default", "await_caller", "synchronize", "record_stream", "record"}
"""Methods by which something waits, or lets something be waited for."""

FUNCTIONS = {"keep_for"}
"""Functions that call `record_stream` for their caller."""

NO_EVENTS = {"worker", "self._worker", "self.epochs", "self._graphs", "graphs"}
"""Objects whose `record` has to do with numbers or graphs."""


def _calls(file: Path) -> Iterator[tuple[str, int]]:
    """Name and line of each such call of a module."""
    path = file.relative_to(PACKAGE).as_posix()

    def walk(node: ast.AST, place: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            match child:
                case ast.Call(func=ast.Attribute(value, name)) if name in METHODS:
                    if name != "record" or ast.unparse(value) not in NO_EVENTS:
                        yield f"{path} {place}: {ast.unparse(child)}", child.lineno
                case ast.Call(func=ast.Name(name)) if name in FUNCTIONS:
                    yield f"{path} {place}: {ast.unparse(child)}", child.lineno
            yield from walk(child, inner)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), "")


@cache
def edges() -> dict[str, frozenset[Site]]:
    """Files and lines of each such call in flowdp, by `module function: call`."""
    found: dict[str, frozenset[Site]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name, line in _calls(file):
            found[name] = found.get(name, frozenset()) | {(str(file), line)}
    return found
