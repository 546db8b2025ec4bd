"""The code of the README and of docs/ runs, each page from its top to its end.

A block of Python behind `<!-- with: name -->` has the names of that preamble, too; one behind
`<!-- not run: why -->` is only compiled. Of a diff the new lines run. Trainers and loops have two CPU
devices, and a few steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp.device.draws import generators_kept
from tests.docs.preambles import PREAMBLES, small

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

ELSEWHERE = {
    "README.md": "contract/test_readme.py",
    "docs/callbacks.md": "reliability/test_long_pages.py",
    "docs/evaluation.md": "reliability/test_long_pages.py",
    "docs/tuning.md": "reliability/test_long_pages.py",
}
"""Pages whose code another test runs, which also looks at the results."""

NOT_RUN = 1
"""Blocks of all pages that are only compiled: run_elastic wants a lighthouse."""

BLOCK = re.compile(
    r"(?:^<!-- (with|not run): (.+?) -->\n+)?^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    preamble: str | None
    runs: bool


def blocks(page: str) -> list[Block]:
    """The blocks of Python on a page, and the new lines of its diffs."""
    return [
        Block(
            line=page.count("\n", 0, match.start(4)) + 1,
            code=side(match[4], "+") if match[3] == "diff" else match[4],
            preamble=match[2] if match[1] == "with" else None,
            runs=match[1] != "not run",
        )
        for match in BLOCK.finditer(page)
    ]


def side(diff: str, sign: str) -> str:
    """One side of a diff, "+" or "-"; lines of the other are empty, and line numbers those of the page."""
    return "\n".join(line[1:] if line[:1] in ("", " ", sign) else "" for line in diff.splitlines())


def code(page: str) -> list[Block]:
    return blocks((ROOT / page).read_text(encoding="utf-8"))


RUN_HERE = [page for page in PAGES if page not in ELSEWHERE and code(page)]


class SmallTrainer(flowdp.Trainer):
    """A Trainer on two CPU devices, for two epochs at most; a first argument `...` stands for `options`."""

    made: list[SmallTrainer]
    options: dict[str, Any]

    def __init__(self, *args: Any, **given: Any) -> None:
        if args == (...,):
            args, given = (), {**self.options, **given}
        given |= {"devices": ["cpu", "cpu"], "progress": False}
        if given.get("epochs"):
            given["epochs"] = min(given["epochs"], 2)
        super().__init__(*args, **given)
        self.made.append(self)

    def start(self) -> flowdp.Run:
        self.made.remove(self)
        return super().start()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[SmallTrainer]]:
    """Trainers that a block made and did not start."""
    opened: list[flowdp.DataParallel] = []
    setup = flowdp.setup

    def small_setup(model: Any, *args: Any, **given: Any) -> flowdp.DataParallel:
        """Set up on two CPU devices, the module of an earlier `setup`, too."""
        if isinstance(model, flowdp.DataParallel):
            model.close()
            model = model.module
        opened.append(setup(model, *args, **{"devices": ["cpu", "cpu"], **given}))
        return opened[-1]

    compile_quickly = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_quickly)
    SmallTrainer.made = []
    monkeypatch.setattr(flowdp, "Trainer", SmallTrainer)
    monkeypatch.setattr(flowdp, "setup", small_setup)
    monkeypatch.chdir(tmp_path)
    with generators_kept():
        torch.manual_seed(0)
        yield SmallTrainer.made
    for model in opened:
        model.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_page_runs(page: str, made: list[SmallTrainer], capsys: pytest.CaptureFixture[str]) -> None:
    names = small()
    for block in code(page):
        if block.preamble:
            names |= PREAMBLES[block.preamble]()
        SmallTrainer.options = names["options"]
        compiled = compile("\n" * (block.line - 1) + block.code, page, "exec")
        if block.runs:
            exec(compiled, names)
        for run in flowdp.runs():
            run.join()
        for trainer in list(made):  # a block that only makes one shows its options: they are to work
            trainer.fit()


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_pages_that_run_elsewhere_do(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_the_old_sides_of_diffs_are_programs() -> None:
    diffs = [diff for page in PAGES for diff in DIFF.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert len(diffs) >= 5
    for diff in diffs:
        ast.parse(side(diff, "-"))


def test_few_blocks_are_not_run() -> None:
    found = [(page, block.line) for page in PAGES for block in code(page) if not block.runs]
    assert len(found) <= NOT_RUN, found
