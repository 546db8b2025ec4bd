"""Tests of the GPU test run: after a test that crashes the process, the others still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.gpu.suite import JOURNAL, run_suite

ROOT = Path(__file__).resolve().parents[3]

MIXED = """
import os, pytest
def test_first(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="no card")
def test_skipped(): pass
def test_crash(): os.abort()
@pytest.fixture
def broken(): raise OSError("no such thing")
def test_setup(broken): pass
def test_last(): pass
"""


def caller(folder: Path, text: str, calls: list[int]):
    """Runs the tests in `text` instead of tests/gpu."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)

    def call(arguments: list[str], environment: dict[str, str]) -> int:
        assert environment[JOURNAL]
        arguments = ["test_it.py" if argument == "tests/gpu" else argument for argument in arguments]
        environment = {**environment, "PYTHONPATH": str(ROOT)}
        calls.append(
            subprocess.run(
                [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, check=False
            ).returncode
        )
        return calls[-1]

    return call


def test_a_crash_costs_one_test(tmp_path: Path) -> None:
    calls: list[int] = []
    suite = run_suite(tmp_path / "journal", caller(tmp_path, MIXED, calls))
    outcomes = {outcome.test.rpartition("::")[2]: outcome for outcome in suite.outcomes}
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {
        "test_first": "passed",
        "test_wrong": "failed",
        "test_skipped": "skipped",
        "test_crash": "lost",
        "test_setup": "failed",
        "test_last": "passed",
    }
    assert outcomes["test_wrong"].why == "assert 1 == 2"
    assert outcomes["test_skipped"].why == "no card"
    assert "no such thing" in outcomes["test_setup"].why
    assert len(calls) == 2
    assert suite.is_complete
    assert not suite.is_right
    assert str(suite).startswith("2 ")
    assert "lost: test_it.py::test_crash" in str(suite)
