"""Checks and measurements for a machine with CUDA, by the interpreter as it is: no venv, no installation.

    python -m bench.gpu                      all calls, one after the other
    python -m bench.gpu --call first         one call, over in less than ten minutes
    python -m bench.gpu --only averaging     one part alone
    python -m bench.gpu --only tests --select "memory and not starts"
    python -m bench.gpu --rehearse           the same code on CPU devices, tiny, to see that it runs

Each part is its own process with a time limit, so a hang or a crash costs that part. The record, the journal
of the tests and the log go to $OUT where that is set, else to bench/results and build/gpu; the record is
written after each part, and the findings of a part as they come. The exit code is 0 if the tests passed and
all parts finished, 3 if nothing failed and the time was over, else 1; experiments do not count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TextIO

import torch

from bench.gpu.part import Findings
from bench.gpu.programme import CALL_LIMIT_S, CALLS, PARTS, TESTS, Part, limit_s
from bench.gpu.suite import CUT, Suite, complete_lines, run_suite
from bench.harness import RESULTS, ROOT, report

GRACE_S = 5.0
LEAST_S = 5.0
"""Time for which no part begins."""

NO_TIME = "no time left"
SHOWN = 40
"""Lines of its log shown for a failed part."""

EXIT_CODES = {"passed": 0, "FAILED": 1, "CUT": 3}


@cache
def card() -> dict[str, str | None]:
    """Name and versions of the GPU and the libraries, without initializing CUDA in this process."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        shown = ""
    name, _, driver = shown.partition("\n")[0].partition(", ")
    versions = {
        name: importlib.metadata.version(name)
        for name in ("cupy-cuda12x", "cupy-cuda13x", "pytest")
        if list(importlib.metadata.Distribution.discover(name=name))
    }
    has_nccl = torch.version.cuda is not None and platform.system() == "Linux"
    return {
        "gpu": name or None,
        "gpus": str(len(shown.splitlines())),
        "driver": driver or None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        **versions,
    }


@dataclass
class Session:
    """One or more calls of the programme.

    Attributes:
        is_rehearsal: Whether it runs on CPU devices.
        log: Output of all parts.
        folder: Folder of the findings of each part, as they come, and of the journal of the tests.
        results: Folder of the record.
        name: Name of the record.
        ends_s: Deadline by `monotonic`; None: each part has its own limit alone.
        select: Expression that chooses tests, as pytest's `-k`; empty: all.
        findings: Findings of all parts.
        failed: Parts that did not finish, and why.
        suite: Result of the tests; None if they did not run.
        seconds: Durations of the parts.
    """

    is_rehearsal: bool
    log: TextIO
    folder: Path
    results: Path = RESULTS
    name: str = "gpu"
    ends_s: float | None = None
    select: str = ""
    findings: Findings = field(default_factory=Findings)
    failed: dict[str, str] = field(default_factory=dict)
    suite: Suite | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def python(self, arguments: list[str], limit_s: float, environment: dict[str, str] | None = None) -> int:
        """Run Python for at most `limit_s` seconds; its output goes to the log.

        Returns:
            The exit code; `CUT` if the time was over.
        """
        self.log.flush()
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-u", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group, so that its children can be ended with it
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it prints its stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return CUT
        finally:
            with suppress(ProcessLookupError):  # the whole group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def limited(self, limit_s: float) -> float:
        """A limit, or the rest of the time if that is less."""
        return limit_s if self.ends_s is None else min(limit_s, self.ends_s - monotonic() - GRACE_S)

    def run_part(self, name: str, part: Part) -> None:
        """Run a part and collect its findings, even if it does not finish."""
        limit_s = self.limited(part.limit_s)
        if limit_s < LEAST_S:
            self.failed[name] = NO_TIME
            return
        found = self.folder / f"{name}.jsonl"
        found.unlink(missing_ok=True)
        arguments = ["-m", "bench.gpu.programme", name, str(found), "--limit", str(limit_s)]
        began_s = monotonic()
        code = self.python(
            [*arguments, *(["--rehearse"] if self.is_rehearsal else [])],
            limit_s + GRACE_S,
            {**part.environment, **os.environ},
        )
        if found.exists():
            for line in complete_lines(found):
                self.findings.add_line(line)
            found.unlink()  # the record has them, and a machine may hand few files back
        if code != 0:
            # The process ends itself at its limit, with exit code 1.
            is_over = code == CUT or monotonic() - began_s >= limit_s
            late = f"not over within {limit_s:.0f} s" if limit_s == part.limit_s else NO_TIME
            self.failed[name] = late if is_over else f"exit code {code}"

    def run_tests(self) -> None:
        """Run `tests/gpu`."""
        ends_s = monotonic() + self.limited(limit_s(TESTS))
        journal = self.folder / "tests.jsonl"
        journal.unlink(missing_ok=True)
        # Tests that need no GPU run elsewhere.
        options = [] if self.is_rehearsal else ["-m", "gpu"]
        self.suite = run_suite(
            journal,
            lambda arguments, environment: self.python(
                arguments, max(5.0, ends_s - monotonic()), environment
            ),
            [*options, *(["-k", self.select] if self.select else [])],
        )

    def run(self, name: str) -> None:
        """Run a part or the tests, and write the record; on a failure print the end of the log."""
        began_s = monotonic()
        self.log.write(f"== {name}\n")
        self.log.flush()
        start = os.path.getsize(self.log.name)
        if name == TESTS:
            self.run_tests()
        else:
            self.run_part(name, PARTS[name])
        self.seconds[name] = round(monotonic() - began_s, 1)
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)
        if name in self.failed or (name == TESTS and self.suite and not self.suite.is_right):
            with open(self.log.name, encoding="utf-8", errors="replace") as printed:
                printed.seek(start)
                print(*printed.read().splitlines()[-SHOWN:], sep="\n", flush=True)
        with redirect_stdout(io.StringIO()):  # the table comes at the end
            self.report()

    @property
    def verdict(self) -> str:
        """One of `EXIT_CODES`; experiments may fail."""
        failed = [name for name in self.failed if not PARTS[name].is_experiment]
        if any(self.failed[name] != NO_TIME for name in failed):
            return "FAILED"
        if self.suite is not None and not self.suite.is_sound:
            return "FAILED"
        return "CUT" if failed or (self.suite is not None and not self.suite.is_right) else "passed"

    def report(self) -> None:
        """Print the table, and write the record."""
        report(
            self.name,
            self.findings.comparisons,
            figures=self.findings.figures,
            save=not self.is_rehearsal,
            folder=self.results,
            more={
                "card": card(),
                "failed": self.failed,
                "seconds": self.seconds,
                "notes": self.findings.notes,
                "tests": [vars(outcome) for outcome in self.suite.outcomes] if self.suite else [],
            },
        )

    def close(self) -> None:
        """Print the findings, and then the table."""
        for name, why in self.failed.items():
            experiment = " (an experiment)" if PARTS[name].is_experiment else ""
            print(f"FAILED: {name}{experiment}: {why}; see {self.log.name}")
        for note in self.findings.notes:
            print(note)
        if self.suite is not None:
            print(f"tests/gpu: {self.suite}")
        self.report()


def chosen(calls: Sequence[str] | None, only: Sequence[str] | None) -> list[str]:
    """Parts to run, in order."""
    order = [name for call in CALLS.values() for name in call]
    wanted = {*(only or ()), *(name for call in calls or () for name in CALLS[call])}
    return [name for name in order if name in wanted] if wanted else order


def places(environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Folder of the record, and folder of log, findings and journal."""
    out = environment.get("OUT")
    # Absolute, for the parts run in the project's root.
    return (Path(out).resolve(),) * 2 if out else (RESULTS, ROOT / "build" / "gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on CPU devices, with tiny sizes")
    parser.add_argument("--call", choices=CALLS, action="append", help="this call; may be repeated")
    parser.add_argument("--only", choices=[TESTS, *PARTS], action="append", help="this part; may be repeated")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="tests to run, as pytest's -k")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("no CUDA device here; python -m bench.gpu --rehearse runs the same code on the CPU")
        return 2
    order = chosen(arguments.call, arguments.only)
    results, folder = places(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    named = "-".join(arguments.call or arguments.only or ())
    started_s = monotonic()
    is_one_call = sum(map(limit_s, order)) <= CALL_LIMIT_S
    with (folder / "gpu.log").open("w", encoding="utf-8") as log:
        session = Session(
            arguments.rehearse,
            log,
            folder,
            results,
            name=f"gpu-{named}" if named else "gpu",
            # Room for the starts and ends of the processes, which their limits do not hold.
            ends_s=started_s + CALL_LIMIT_S + 20 if is_one_call else None,
            select=arguments.select,
        )
        for name in order:
            session.run(name)
        session.close()
    print(f"{monotonic() - started_s:.0f} s in all; {session.verdict}")
    return EXIT_CODES[session.verdict]


if __name__ == "__main__":
    sys.exit(main())
