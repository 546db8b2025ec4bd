"""The longest modules and functions, as advice where to look; nothing fails."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flowdp", "bench", "examples")
MODULE_LINES = 600
FUNCTION_LINES = 70


def functions(source: str) -> list[tuple[int, str]]:
    """Lines and name of each function of a module, with its docstring, without decorators."""
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def table(title: str, sizes: list[tuple[int, str]], limit: int, count: int) -> str:
    """The longest ones, a line each, with a star beyond the limit."""
    rows = [
        f"{lines:6,} {'*' if lines > limit else ' '} {name}" for lines, name in sorted(sizes)[::-1][:count]
    ]
    beyond = sum(lines > limit for lines, _ in sizes)
    return "\n".join([f"{title}: {len(sizes):,}, {beyond} of them longer than {limit} lines", *rows])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=15, help="rows of each table")
    count = parser.parse_args().count
    modules, parts = [], []
    for file in (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))):
        path, source = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        modules.append((len(source.splitlines()), path))
        parts += [(lines, f"{path}:{name}") for lines, name in functions(source)]
    print(table("Modules", modules, MODULE_LINES, count))
    print()
    print(table("Functions", parts, FUNCTION_LINES, count))


if __name__ == "__main__":
    main()
