"""The code of a page as programs, each of which runs from an empty file.

A block of Python is a program. If its first line is `CONTINUES`, it is a fragment and belongs to the program
above it on the page. A diff changes the program above it, where its old lines stand there; otherwise its new
lines are a program. A program with a comment that is a command of torchrun is started by it. One with a
comment that is a command of pip needs these packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTINUES", "FENCE", "ROOT", "Program", "programs", "side"]

ROOT = Path(__file__).resolve().parents[2]

CONTINUES = "# continues the program above"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A program of a page; its lines have the page's numbers, unless a diff changed it."""

    page: str
    line: int
    code: str

    @property
    def torchrun(self) -> list[str]:
        """Arguments of torchrun, without the name of the script; empty: Python alone runs the program."""
        match = re.search(r"^# torchrun (.*) \w+\.py$", self.code, re.MULTILINE)
        return match[1].split() if match else []

    @property
    def needs(self) -> list[str]:
        """Packages that the program needs besides those of flowdp; modules have their names."""
        match = re.search(r"^# pip install (.*)$", self.code, re.MULTILINE)
        return match[1].split() if match else []


def programs(page: str) -> list[Program]:
    """The programs of a page.

    Raises:
        ValueError: A block continues a program, and there is none above it.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Program] = []
    for language, block, line in _blocks(text):
        padded = "\n" * (line - 1) + block
        if language == "python" and block.startswith(CONTINUES):
            if not found:
                raise ValueError(f"{page}:{line}: no program stands above this fragment")
            above = found.pop()
            found.append(Program(page, above.line, above.code + padded[above.code.count("\n") :]))
        elif language == "python":
            found.append(Program(page, line, padded))
        elif language == "diff":
            old, new = side(block, "-"), side(block, "+")
            is_change = bool(found) and old in found[-1].code
            found.append(Program(page, line, found[-1].code.replace(old, new) if is_change else new))
    for program in found:
        ast.parse(program.code, f"{page}:{program.line}")
    return found


def side(diff: str, sign: str) -> str:
    """One side of a diff: "+" the new one, "-" the old one."""
    lines = [line for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    return "".join(f"{line[1:]}\n" for line in lines)


def _blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of each block of a page."""
    for match in FENCE.finditer(text):
        yield match[1], match[2], text.count("\n", 0, match.start(2)) + 1
