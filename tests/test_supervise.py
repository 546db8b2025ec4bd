"""Processes that die are started again, and those that are told to end are not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUPERVISE = [sys.executable, "-I", str(ROOT / "flowdp/supervise.py")]  # the file alone: without torch
TIMEOUT_S = 60

SAY = """
import os, signal, sys
print("start", os.environ["FLOWDP_RESTARTS"], *sys.argv[1:], flush=True)
restarts = int(os.environ["FLOWDP_RESTARTS"])
signal.alarm(100)  # nobody ends it where the supervisor fails to
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test puts its script."""
    return tmp_path / "train.py"


def supervised(script: Path, body: str, *options: str, command: list[str] = SUPERVISE) -> list[str]:
    script.write_text(SAY + body)
    return [*command, *options, str(script)]


def run(command: list[str]) -> tuple[int, list[str], list[str]]:
    """Exit code, printed lines, and what the supervisor said, with its seconds left out."""
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, input="typed"
    )
    said = [re.sub(r"\d+\.\d s", "some s", line) for line in child.stderr.splitlines()]
    return child.returncode, child.stdout.splitlines(), said


def test_it_is_restarted_until_it_ends_well(script: Path) -> None:
    body = """
if restarts == 0:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7 if restarts == 1 else 0)
"""
    code, printed, said = run([*supervised(script, body, "--backoff", "0.01"), "--restarts", "x"])
    assert code == 0
    assert printed == [f"start {number} --restarts x" for number in range(3)]  # the script's own arguments
    assert said == [
        f"flowdp.supervise: {script} ended by signal 9 (Killed) after some s; restart 1 of 10 in 0.01 s",
        f"flowdp.supervise: {script} ended with exit code 7 after some s; restart 2 of 10 in 0.02 s",
    ]


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(5)", 5), ("signal.raise_signal(9)", 137)])
def test_it_is_given_up_after_so_many_restarts_in_a_row(script: Path, ending: str, code: int) -> None:
    options = ("--restarts", "2", "--backoff", "0.01")
    assert run(supervised(script, ending, *options))[:2] == (code, ["start 0", "start 1", "start 2"])


def test_no_restart_at_all(script: Path) -> None:
    code, printed, said = run(supervised(script, "sys.exit(3)", "--restarts", "0"))
    assert (code, printed) == (3, ["start 0"])
    assert said == [
        f"flowdp.supervise: {script} ended with exit code 3 after some s; given up after 0 restarts"
    ]


def test_a_child_that_lived_long_is_counted_anew(script: Path) -> None:
    # A process takes longer to start than ten times a tenth of a millisecond.
    body = "sys.exit(1 if restarts < 4 else 0)"
    options = ("--restarts", "1", "--backoff", "0.00001", "--max-backoff", "0.0001")
    code, printed, said = run(supervised(script, body, *options))
    assert (code, len(printed)) == (0, 5)
    assert all("restart 1 of 1 in 1e-05 s" in line for line in said)


@contextmanager
def begun(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A supervisor whose script has said that it is ready."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            assert any(line == "ready\n" for line in child.stdout)
            yield child
        finally:
            child.kill()


WAIT = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
number = os.read(reader, 1)[0]
print("heard", number, os.getpgid(0) == os.getpid(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [0, 4])
def test_a_signal_is_passed_on_and_ends_it(script: Path, number: signal.Signals, code: int) -> None:
    # A background job of a shell has SIGINT ignored: the tests' own session sees to it that it is not.
    with begun(supervised(script, WAIT + f"sys.exit({code})")) as child:
        child.send_signal(number)
        printed, said = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == code
    assert printed == f"heard {number:d} True\n"
    assert said == (f"flowdp.supervise: {number.name} is passed on to {script}, which is not started again\n")


def test_a_script_without_a_handler_ends_by_the_signal(script: Path) -> None:
    body = "print('ready', flush=True)\nsignal.pause()"
    with begun(supervised(script, body)) as child:
        child.terminate()
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 128 + signal.SIGTERM


def test_a_signal_in_the_pause_ends_it(script: Path) -> None:
    command = supervised(script, "sys.exit(6)", "--backoff", "1000", "--max-backoff", "500")
    command = ["sh", "-c", 'exec 2>&1; echo ready; exec "$@"', "sh", *command]
    with begun(command) as child:
        assert child.stdout is not None
        assert any(line.endswith("restart 1 of 10 in 500 s\n") for line in child.stdout)
        child.send_signal(signal.SIGTERM)
        said, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 6
    assert said == f"flowdp.supervise: {script} is not started again\n"


def test_a_signal_that_is_ignored_stays_ignored(script: Path) -> None:
    body = "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)" + WAIT
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *supervised(script, body)]
    with begun(command) as child:
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        printed, said = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, printed) == (0, f"heard {signal.SIGTERM:d} True\n")
    assert "SIGHUP" not in said


def test_it_is_asked_for_nothing_at_the_terminal(script: Path) -> None:
    code, printed, _ = run(supervised(script, "print(repr(sys.stdin.read()))"))
    assert (code, printed) == (0, ["start 0", "''"])


def test_a_module_with_the_interpreters_own_options() -> None:
    # As a user calls it; torch is imported on the way.
    command = [sys.executable, "-X", "utf8", "-W", "error", "-m", "flowdp.supervise", "--restarts", "0", "-m"]
    code, printed, said = run(
        [*command, "timeit", "-n", "1", "-r", "1", "import sys; print(sys.warnoptions)"]
    )
    assert (code, said) == (0, [])
    assert printed[0] == "['error']"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give a script that is there, or -m and a module"),
        (["nowhere.py"], "give a script that is there, or -m and a module"),
        (["--restarts", "-1", __file__], "must be at least 0"),
        (["--backoff", "nan", __file__], "must be at least 0"),
        (["--max-backoff", "0", __file__], "above 0"),
    ],
)
def test_what_it_does_not_understand_runs_nothing(arguments: list[str], complaint: str) -> None:
    code, printed, said = run([*SUPERVISE, *arguments])
    assert (code, printed) == (2, [])
    assert complaint in said[-1]
