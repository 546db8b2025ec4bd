"""Tests of `python -m bench.gpu`: exit code, table, record, and parts that hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import __main__ as command
from bench.gpu.__main__ import Session
from bench.gpu.part import Figure, Findings
from bench.gpu.programme import Part
from bench.gpu.suite import CUT, Outcome, Suite

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with (tmp_path / "log").open("w") as log:
        yield Session(True, log, tmp_path, tmp_path / "out", ends_s=time.monotonic() + 60)


def printed(session: Session) -> str:
    return Path(session.log.name).read_text()


def test_a_rehearsal_of_one_part(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--rehearse", "--only", "facts", "--only", "nccl2"],
        cwd=ROOT, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a kernel, host, us" in done.stdout
    assert "nccl2: skipped, NCCL needs a CUDA device" in done.stdout
    assert done.stdout.rstrip().endswith("s in all; passed")
    # A rehearsal leaves no record.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.log"]


def test_what_hangs_is_ended_and_shows_where(session: Session) -> None:
    hanging = "import threading\ndef wait_for_ever(): threading.Event().wait()\nwait_for_ever()"
    assert session.python(["-c", hanging], 5.0) == CUT  # enough to start Python on a busy machine
    assert "wait_for_ever" in printed(session)


def test_a_part_that_fails_is_named_and_its_findings_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.PARTS, "broken", Part(20, lambda: None))  # type: ignore[arg-type, return-value]

    def python(arguments: list[str], limit_s: float, environment: dict[str, str] | None = None) -> int:
        Path(arguments[3]).write_text(Findings.line(Figure("before it broke, ms", 1.0)))
        print("why it broke", file=session.log, flush=True)
        return 1

    monkeypatch.setattr(session, "python", python)
    session.run("broken")
    assert session.failed == {"broken": "exit code 1"}
    assert session.findings.figures == {"before it broke, ms": 1.0}
    assert session.verdict == "FAILED"
    assert "why it broke" in capsys.readouterr().out


def test_the_record(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session.is_rehearsal = False
    session.findings.add(Figure("copy, GB/s", 4000.0))
    session.suite = Suite([Outcome("tests/gpu/test_x.py::test_y", "passed", 0.1)], is_complete=True)
    session.close()
    (path,) = (tmp_path / "out").glob("gpu_*.json")
    record = json.loads(path.read_text())
    assert record["figures"] == {"copy, GB/s": 4000.0}
    assert record["tests"][0]["outcome"] == "passed"
    assert record["failed"] == {}
    assert {"gpu", "driver", "cuda", "nccl"} <= record["card"].keys()
    assert {"cpu", "torch", "python"} <= record["machine"].keys()
    assert "tests/gpu: 1 passed" in capsys.readouterr().out
