"""The code of README and docs/ runs as it stands, from an empty file."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp.device.draws import generators_kept
from tests.docs.programs import ROOT, Program, programs

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

ELSEWHERE = {
    "docs/callbacks.md": "reliability/test_long_pages.py",
    "docs/evaluation.md": "reliability/test_long_pages.py",
    "docs/tuning.md": "reliability/test_long_pages.py",
}
"""Pages whose code another test runs, which also looks at the results."""

LOOPS_OF_THE_READER = {"README.md": 1}
"""Diffs at the top of a page that change a loop which the reader has; `contract/test_readme.py` runs it."""


def found() -> list[Program]:
    every = [programs(page)[LOOPS_OF_THE_READER.get(page, 0) :] for page in PAGES if page not in ELSEWHERE]
    return [program for page in every for program in page if program != resumed()]


def resumed() -> Program:
    """The program of the README that goes on where it was stopped."""
    [program] = [program for program in programs("README.md") if "resume=True" in program.code]
    return program


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in; the generators of the process are put back, and no C++ compiler is needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with generators_kept():
        torch.manual_seed(0)
        yield tmp_path
    gc.collect()  # a loop's threads end with its wrapper


def run(program: Program, folder: Path) -> dict[str, Any]:
    """The names that a program has made; its runs have ended, as at the exit of a script."""
    script = folder / "train.py"
    script.write_text(program.code, encoding="utf-8")
    if program.torchrun:
        # Gloo aborts now and then as a process ends: a rank leaves a file behind its last line.
        end = "\nimport os, pathlib\npathlib.Path(f\"ended-{os.environ['RANK']}\").touch()\n"
        script.write_text(program.code + end, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", *program.torchrun, str(script)]
        subprocess.run(command, cwd=folder, check=False)
        ranks = int(program.torchrun[program.torchrun.index("--nproc-per-node") + 1])
        assert len(list(folder.glob("ended-*"))) == ranks
        return {}
    names = runpy.run_path(str(script), run_name="__main__")
    for started in flowdp.runs():
        started.join()
    return names


@pytest.mark.parametrize("program", found(), ids=lambda one: f"{one.page}:{one.line}")
def test_a_program_runs(program: Program, folder: Path) -> None:
    for package in program.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (flowdp[real])")
    with warnings.catch_warnings():
        if program.needs:  # of those packages, on a machine without an accelerator
            warnings.simplefilter("ignore")
        run(program, folder)


def test_the_readme_goes_on_where_it_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(resumed(), folder)
    assert "epoch 1" in capsys.readouterr().out
    run(resumed(), folder)
    assert "loss" not in capsys.readouterr().out  # nothing is left to train


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_pages_that_run_elsewhere_do(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")
