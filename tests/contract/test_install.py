"""`make` shows what pip does, and what has failed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / ".ci/install.py"


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip behind the line of progress, without a package index."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", *arguments]
    return subprocess.run(
        [sys.executable, INSTALL, "Installing it", *command], capture_output=True, text=True
    )


def test_a_log_has_the_beginning_and_the_end() -> None:
    done = install("pytest")  # it is there
    assert done.returncode == 0, done.stderr
    begin, end = done.stdout.splitlines()
    assert begin == "Installing it"
    assert end.startswith("Installing it: done in ")
    assert done.stderr == ""


def test_a_failure_shows_what_pip_said() -> None:
    done = install("no-such-package-of-anyone")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("Installing it: failed after ")
    assert "No matching distribution found for no-such-package-of-anyone" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.2 MB)\n", "downloading torch, 190.2 MB"),
        ("  Using cached numpy-2.3.5-cp311-cp311-linux_x86_64.whl (16 kB)\n", "downloading numpy, 16 kB"),
        ("Installing collected packages: mpmath, networkx, torch\n", "unpacking 3 packages"),
        ("Collecting networkx (from torch)\n", None),
    ],
)
def test_a_line_of_pip_says_what_it_does(line: str, expected: str | None) -> None:
    spec = importlib.util.spec_from_file_location("install", INSTALL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.doing(line) == expected


def test_a_script_beside_the_clone_imports_the_package(tmp_path: Path) -> None:
    """A clone's folder is called flowdp, too, and is no package: an installed one comes before it."""
    (tmp_path / "flowdp" / "docs").mkdir(parents=True)
    script = tmp_path / "mine.py"
    script.write_text("import flowdp; print(flowdp.__file__)")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=alone, check=True)
    assert done.stdout.strip().endswith("__init__.py")
