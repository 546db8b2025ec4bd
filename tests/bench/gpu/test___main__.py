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

from bench.environments import SHARED_CARD
from bench.gpu import __main__ as command
from bench.gpu.__main__ import Session
from bench.gpu.part import Figure, Findings
from bench.gpu.programme import CALLS, PARTS, Part
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


def test_without_cuda_it_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)
    assert command.main() == 2
    assert "--rehearse" in capsys.readouterr().out


def test_what_hangs_is_ended_and_shows_where(session: Session) -> None:
    hanging = "import threading\ndef wait_for_ever(): threading.Event().wait()\nwait_for_ever()"
    assert session.python(["-c", hanging], 5.0) == CUT  # enough to start Python on a busy machine
    assert "wait_for_ever" in printed(session)


ORPHAN = """
import signal, subprocess, sys, threading
signal.signal(signal.SIGABRT, signal.SIG_IGN)
hold = "pipe = open(sys.argv[1], 'w'); pipe.write('x'); pipe.flush(); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", "import sys; " + hold, sys.argv[1]], stdin=subprocess.PIPE)
threading.Event().wait()
"""


@pytest.mark.posix
def test_what_a_process_has_started_ends_with_it(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "GRACE_S", 0.5)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert session.python(["-c", ORPHAN, str(tmp_path / "pipe")], 3.0) == CUT
    os.set_blocking(pipe, True)
    with open(pipe) as held:
        assert held.read() == "x"  # ends when the other end is closed everywhere


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


@pytest.mark.parametrize(
    ("limit_s", "ends_s", "why", "verdict"),
    [(1.0, None, "not over within 1 s", "FAILED"), (60.0, 15.0, "no time left", "CUT")],
    ids=["its own limit", "the end of the call"],
)
def test_a_part_that_is_not_over_is_told_from_one_that_fails(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    ends_s: float | None,
    why: str,
    verdict: str,
) -> None:
    slow = Part(limit_s, lambda: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(command.PARTS, "slow", slow)
    monkeypatch.setattr(session, "python", lambda *_: CUT)
    session.ends_s = None if ends_s is None else time.monotonic() + ends_s
    monkeypatch.setattr(command, "LEAST_S", 0.5)
    session.run_part("slow", slow)
    assert (session.failed, session.verdict) == ({"slow": why}, verdict)


def test_variables_of_a_part_are_its_own_and_give_way(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(session, "python", lambda _a, _l, environment: seen.append(environment) or 0)
    for name in SHARED_CARD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    for name in ("nccl1", "nccl2"):
        session.run_part(name, PARTS[name])
    assert seen[0].keys() & SHARED_CARD.keys() == {"NCCL_MAX_CTAS"}
    assert {name: seen[1][name] for name in SHARED_CARD} == {**SHARED_CARD, "NCCL_MAX_CTAS": "2"}


def test_an_experiment_may_fail(session: Session) -> None:
    session.failed["nccl2"] = "exit code 1"
    assert session.verdict == "passed"
    session.failed["averaging"] = "exit code 1"
    assert session.verdict == "FAILED"


@pytest.mark.parametrize(
    ("outcome", "is_cut", "verdict"),
    [
        ("passed", False, "passed"),
        ("skipped", False, "passed"),
        ("failed", False, "FAILED"),
        ("cut", True, "CUT"),
        ("failed", True, "FAILED"),
    ],
)
def test_a_failed_test_is_told_from_one_that_was_cut(
    session: Session, outcome: str, is_cut: bool, verdict: str
) -> None:
    session.suite = Suite([Outcome("tests/gpu/test_x.py::test_y", outcome)], not is_cut, is_cut, planned=2)
    assert session.verdict == verdict


def test_no_part_begins_when_the_time_is_over(session: Session) -> None:
    session.ends_s = time.monotonic() + 1
    session.run_part("facts", command.PARTS["facts"])
    assert session.failed == {"facts": "no time left"}
    assert session.verdict == "CUT"


def test_parts_are_chosen_by_call_or_by_name_and_keep_their_order() -> None:
    assert command.chosen(["first"], None) == ["facts", "nccl1", "policies"]
    assert command.chosen(None, ["host", "tests", "facts"]) == ["facts", "tests", "host"]
    assert command.chosen(None, None) == [name for call in CALLS.values() for name in call]


def test_the_record_is_there_after_each_part(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.is_rehearsal, session.name = False, "gpu-first"
    monkeypatch.setattr(session, "python", lambda *_: 0)
    session.run("facts")
    (path,) = (tmp_path / "out").glob("gpu-first_*.json")
    assert json.loads(path.read_text())["seconds"].keys() == {"facts"}


def test_tests_are_selected(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(session, "python", lambda arguments, *_: seen.extend(arguments) or 5)
    session.is_rehearsal, session.select = False, "memory"
    session.run_tests()
    assert seen[seen.index("-k") + 1] == "memory"
    assert seen[seen.index("-m", 1) + 1] == "gpu"


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
