"""`tests/gpu` in one process, and the rest in another if a test crashed the first.

As a plugin of pytest (`-p bench.gpu.suite`) this keeps a journal: a line when a test begins, one when it
ends. A test that began and did not end has hung or crashed, and is skipped the next time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["JOURNAL", "Outcome", "Suite", "complete_lines", "run_suite"]

JOURNAL = "FLOWDP_GPU_JOURNAL"
"""Environment variable of pytest with the path of the journal."""

TEST_LIMIT_S = 90
RESTARTS = 3


@dataclass(frozen=True)
class Outcome:
    """Result of a test.

    Attributes:
        test: Its pytest name.
        outcome: "passed", "failed", "skipped", or "lost" if it crashed or hung the process.
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
    """

    outcomes: Sequence[Outcome]
    is_complete: bool

    @property
    def is_right(self) -> bool:
        """Whether all tests passed that this machine can run."""
        return self.is_complete and all(o.outcome in ("passed", "skipped") for o in self.outcomes)

    def __str__(self) -> str:
        """The counts, then a line for each test that did not pass."""
        counts = Counter(outcome.outcome for outcome in self.outcomes)
        lines = [", ".join(f"{count} {word}" for word, count in counts.most_common()) or "no tests"]
        if not self.is_complete:
            lines[0] += "; not all were reached"
        lines += [
            f"  {o.outcome}: {o.test.rpartition('/')[2]}: {o.why}"
            for o in self.outcomes
            if o.outcome in ("failed", "lost")
        ]
        reasons = Counter(o.why for o in self.outcomes if o.outcome == "skipped")
        return "\n".join([*lines, *(f"  skipped {count}: {why}" for why, count in reasons.items())])


def run_suite(
    journal: Path, call: Callable[[list[str], dict[str, str]], int], options: Sequence[str] = ()
) -> Suite:
    """Run the tests until all have been reached.

    Args:
        journal: Path of a new file.
        call: Runs Python with these arguments and environment, and returns its exit code.
        options: More options of pytest.
    """
    # Without pytest-timeout, pytest's faulthandler can dump all stacks and exit.
    arguments = [
        "-m", "pytest", "tests/gpu", "-p", "bench.gpu.suite", *options,
        "-o", f"faulthandler_timeout={TEST_LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true",
    ]  # fmt: skip
    environment = {**os.environ, JOURNAL: str(journal)}
    for _ in range(1 + RESTARTS):
        code = call(arguments, environment)
        outcomes = read(journal)
        if code in (0, 1, 5):  # all ran; some failed; none was left to run
            return Suite(outcomes, is_complete=bool(outcomes))
        if not any(outcome.outcome == "lost" for outcome in outcomes):
            break  # not caused by a test
    return Suite(outcomes, is_complete=False)


def read(journal: Path) -> list[Outcome]:
    """Results of each test in a journal."""
    outcomes: dict[str, Outcome] = {}
    for line in complete_lines(journal) if journal.exists() else []:
        fields = json.loads(line)
        outcomes[fields["test"]] = Outcome(**fields)
    return list(outcomes.values())


def complete_lines(file: Path) -> list[str]:
    """The complete lines of a file whose writer may have died in the middle of one."""
    return file.read_text(encoding="utf-8").split("\n")[:-1]


# ---------------------------------------------------------------- the plugin
def _note(outcome: Outcome) -> None:
    with open(os.environ[JOURNAL], "a", encoding="utf-8") as file:
        file.write(json.dumps(vars(outcome)) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect the tests in the journal."""
    known = {outcome.test for outcome in read(Path(os.environ[JOURNAL]))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


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
            crash = getattr(why, "reprcrash", None)
            why = (crash.message if crash is not None else str(why)).partition("\n")[0]
        _note(Outcome(report.nodeid, report.outcome, report.duration, why or ""))
