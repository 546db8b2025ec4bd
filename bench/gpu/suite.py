"""`tests/gpu` in one process, and the rest in another if a test crashed the first.

As a plugin of pytest (`-p bench.gpu.suite`) this keeps a journal: how many tests there are, a line when one
begins, a line when it ends. A test that began and did not end has hung or crashed, and is skipped the next
time. Tests marked `long` come last, so that a limit of time costs few of the others.

A kernel that fails spoils its process: each later call on the device raises the same error. So after a test
that failed the device is tried, and where it does not answer, the tests go on in another process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CUT", "JOURNAL", "SPOILT", "Outcome", "Suite", "complete_lines", "run_suite"]

JOURNAL = "FLOWDP_GPU_JOURNAL"
"""Environment variable of pytest with the path of the journal."""

CUT = 124
"""Exit code of a process that was ended by its limit of time, as timeout(1) has it."""

SPOILT = 86
"""Exit code of a process whose device does not answer any more."""

TEST_LIMIT_S = 120
RESTARTS = 6


@dataclass(frozen=True)
class Outcome:
    """Result of a test.

    Attributes:
        test: Its pytest name.
        outcome: "passed", "failed", "skipped", "lost" if it crashed or hung the process, or "cut" if it ran
            when the time was over.
        seconds: Its duration.
        why: Reason of a failure or a skip, in a line.
    """

    test: str
    outcome: str
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Suite:
    """Results of all tests.

    Attributes:
        outcomes: One per test.
        is_complete: Whether all were reached, and collected without an error.
        is_cut: Whether the time was over before the last one.
        planned: Number of all tests; 0 if they were not collected.
    """

    outcomes: Sequence[Outcome]
    is_complete: bool
    is_cut: bool = False
    planned: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether no test failed, of those that were reached in the time."""
        return (self.is_complete or self.is_cut) and all(
            o.outcome in ("passed", "skipped", "cut") for o in self.outcomes
        )

    @property
    def is_right(self) -> bool:
        """Whether all tests passed that this machine can run."""
        return self.is_sound and self.is_complete

    def __str__(self) -> str:
        """The counts, then a line for each test that did not pass."""
        counts = Counter(outcome.outcome for outcome in self.outcomes)
        lines = [", ".join(f"{count} {word}" for word, count in counts.most_common()) or "no tests"]
        if self.is_cut:
            lines[0] += f"; the time was over, and {self.planned - len(self.outcomes)} were not reached"
        elif not self.is_complete:
            lines[0] += "; not all were reached"
        lines += [
            f"  {o.outcome}: {o.test.rpartition('/')[2]}: {o.why}"
            for o in self.outcomes
            if o.outcome in ("failed", "lost", "cut")
        ]
        reasons = Counter(o.why for o in self.outcomes if o.outcome == "skipped")
        return "\n".join([*lines, *(f"  skipped {count}: {why}" for why, count in reasons.items())])


def run_suite(
    journal: Path, call: Callable[[list[str], dict[str, str]], int], options: Sequence[str] = ()
) -> Suite:
    """Run the tests until all have been reached, or the time is over.

    Args:
        journal: Path of a new file.
        call: Runs Python with these arguments and environment, and returns its exit code, or `CUT`.
        options: More options of pytest.
    """
    # Without pytest-timeout, pytest's faulthandler can dump all stacks and exit.
    arguments = [
        "-m", "pytest", "tests/gpu", "-p", "bench.gpu.suite", *options,
        "-o", f"faulthandler_timeout={TEST_LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true",
    ]  # fmt: skip
    # Plugins of the interpreter's other packages are not the suite's; a warning of theirs would fail a test.
    environment = {**os.environ, JOURNAL: str(journal), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for _ in range(1 + RESTARTS):
        before = len(read(journal))
        code = call(arguments, environment)
        if code == CUT:
            _note_cut(journal)
        outcomes, planned = read(journal), count(journal)
        if code == CUT:
            return Suite(outcomes, is_complete=False, is_cut=True, planned=planned)
        # 0: all ran; 1: some failed, or faulthandler ended the process in one that hung; 5: none was left.
        if code in (0, 1, 5) and len(outcomes) >= planned:
            return Suite(outcomes, is_complete=bool(outcomes), planned=planned)
        if len(outcomes) == before:
            break  # not caused by a test
    return Suite(outcomes, is_complete=False, planned=planned)


def read(journal: Path) -> list[Outcome]:
    """Results of each test in a journal; of several failures of a test the first."""
    outcomes: dict[str, Outcome] = {}
    for fields in _entries(journal):
        if "test" in fields:
            outcome = Outcome(**fields)
            before = outcomes.get(outcome.test)
            if before is None or before.outcome != "failed":
                outcomes[outcome.test] = outcome
    return list(outcomes.values())


def count(journal: Path) -> int:
    """Number of all tests, those of earlier processes among them."""
    return max((fields["planned"] for fields in _entries(journal) if "planned" in fields), default=0)


def _entries(journal: Path) -> list[dict[str, Any]]:
    entries = []
    for line in complete_lines(journal) if journal.exists() else []:
        with suppress(ValueError):  # half a line of a process that died, with that of the next one behind it
            entries.append(json.loads(line))
    return entries


def complete_lines(file: Path) -> list[str]:
    """The complete lines of a file whose writer may have died in the middle of one."""
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def _note_cut(journal: Path) -> None:
    """Note that the test that was running did not fail: the time was over."""
    outcomes = read(journal)
    if outcomes and outcomes[-1].outcome == "lost":
        _write(journal, vars(Outcome(outcomes[-1].test, "cut", why="it ran when the time was over")))


def _write(journal: Path, fields: dict[str, Any]) -> None:
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


# ---------------------------------------------------------------- the plugin
_failed: set[str] = set()


def _journal() -> Path:
    return Path(os.environ[JOURNAL])


def _note(outcome: Outcome) -> None:
    _write(_journal(), vars(outcome))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect the tests in the journal, and put those that are marked `long` last."""
    known = {outcome.test for outcome in read(_journal())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]
    items.sort(key=lambda item: item.get_closest_marker("long") is not None)


def pytest_collection_finish(session: Any) -> None:
    """Record how many tests there are."""
    _write(_journal(), {"planned": len(read(_journal())) + len(session.items)})


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test."""
    _note(Outcome(nodeid, "lost", why="it crashed the process"))


def pytest_runtest_logreport(report: Any) -> None:
    """Record the end of a test; a failure in its fixtures counts too."""
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr
        if isinstance(why, tuple):  # file, line and reason of a skip
            why = why[2].removeprefix("Skipped: ")
        elif report.failed:
            _failed.add(report.nodeid)
            crash = getattr(why, "reprcrash", None)
            why = (crash.message if crash is not None else str(why)).partition("\n")[0]
        _note(Outcome(report.nodeid, report.outcome, report.duration, why or ""))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """End the process after a failed test that has spoilt the device for all others."""
    if nodeid in _failed and not device_answers():
        os._exit(SPOILT)


def device_answers() -> bool:
    """Whether CUDA devices in use still do their work."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.ones(1, device="cuda").item()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
