"""Checks and measurements for a machine with CUDA, by the interpreter as it is: no venv, no installation.

    python -m bench.gpu                      the facts, tests/gpu, all benches: under 9 minutes
    python -m bench.gpu --only averaging     one part alone
    python -m bench.gpu --rehearse           the same code on CPU devices, tiny, to see that it runs

Each part is its own process with a time limit, so a hang or a crash costs that part. The record and the
log go to $OUT where that is set, else to bench/results and build/gpu.log. The exit code is 0 if the tests
passed and all parts finished; experiments (several NCCL ranks on one card) do not count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TextIO

import torch

from bench.gpu.part import Findings
from bench.gpu.programme import PARTS, TESTS, TESTS_LIMIT_S, Part
from bench.gpu.suite import Suite, complete_lines, run_suite
from bench.harness import RESULTS, ROOT, report

BUDGET_S = 535.0
GRACE_S = 5.0
SHOWN = 40
"""Lines of its log shown for a failed part."""


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
    """One call of the programme.

    Attributes:
        is_rehearsal: Whether it runs on CPU devices.
        log: Output of all parts.
        folder: Folder for the files of the parts.
        ends_s: Deadline of the session, by `monotonic`.
        findings: Findings of all parts.
        failed: Parts that did not finish, and why.
        suite: Result of the tests; None if they did not run.
    """

    is_rehearsal: bool
    log: TextIO
    folder: Path
    ends_s: float
    findings: Findings = field(default_factory=Findings)
    failed: dict[str, str] = field(default_factory=dict)
    suite: Suite | None = None

    def python(self, arguments: list[str], limit_s: float, environment: dict[str, str] | None = None) -> int:
        """Run Python for at most `limit_s` seconds; its output goes to the log."""
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
            try:
                return process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
            return -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):  # the whole group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def limited(self, limit_s: float) -> float:
        """A limit, or the rest of the budget if that is less."""
        return min(limit_s, self.ends_s - monotonic() - GRACE_S)

    def run_part(self, name: str, part: Part) -> None:
        """Run a part and collect its findings, even if it does not finish."""
        limit_s = self.limited(part.limit_s)
        if limit_s < 5:
            self.failed[name] = "no time left"
            return
        found = self.folder / f"{name}.jsonl"
        arguments = ["-m", "bench.gpu.programme", name, str(found), "--limit", str(limit_s)]
        environment = dict(os.environ)
        if part.is_experiment:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
            environment.setdefault("NCCL_MAX_CTAS", "8")  # so that the kernels of all ranks fit at once
        code = self.python(
            [*arguments, *(["--rehearse"] if self.is_rehearsal else [])], limit_s + GRACE_S, environment
        )
        if found.exists():
            for line in complete_lines(found):
                self.findings.add_line(line)
        if code != 0:
            self.failed[name] = f"exit code {code}"

    def run_tests(self) -> None:
        """Run `tests/gpu`."""
        ends_s = monotonic() + self.limited(TESTS_LIMIT_S)
        self.suite = run_suite(
            self.folder / "tests.jsonl",
            lambda arguments, environment: self.python(
                arguments, max(5.0, ends_s - monotonic()), environment
            ),
            # Tests that need no GPU run elsewhere.
            () if self.is_rehearsal else ("-m", "gpu"),
        )

    def run(self, name: str) -> None:
        """Run a part or the tests; on a failure print the end of the log."""
        began_s = monotonic()
        self.log.write(f"== {name}\n")
        self.log.flush()
        start = os.path.getsize(self.log.name)
        if name == TESTS:
            self.run_tests()
        else:
            self.run_part(name, PARTS[name])
        print(f"{name}: {monotonic() - began_s:.0f} s", flush=True)
        if name in self.failed or (name == TESTS and self.suite and not self.suite.is_right):
            with open(self.log.name, encoding="utf-8", errors="replace") as printed:
                printed.seek(start)
                print(*printed.read().splitlines()[-SHOWN:], sep="\n")

    @property
    def is_right(self) -> bool:
        """Whether the tests passed and every part finished; experiments may fail."""
        failed = [name for name in self.failed if not PARTS[name].is_experiment]
        return not failed and (self.suite is None or self.suite.is_right)

    def close(self, folder: Path) -> None:
        """Print the findings, then the table, and write the record."""
        for name, why in self.failed.items():
            experiment = " (an experiment)" if PARTS[name].is_experiment else ""
            print(f"FAILED: {name}{experiment}: {why}; see {self.log.name}")
        for note in self.findings.notes:
            print(note)
        if self.suite is not None:
            print(f"tests/gpu: {self.suite}")
        report(
            "gpu",
            self.findings.comparisons,
            figures=self.findings.figures,
            save=not self.is_rehearsal,
            folder=folder,
            more={
                "card": card(),
                "failed": self.failed,
                "notes": self.findings.notes,
                "tests": [vars(outcome) for outcome in self.suite.outcomes] if self.suite else [],
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on CPU devices, with tiny sizes")
    parser.add_argument("--only", choices=[TESTS, *PARTS], action="append", help="this part; may be repeated")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("no CUDA device here; python -m bench.gpu --rehearse runs the same code on the CPU")
        return 2
    first, *rest = PARTS
    order = [name for name in (first, TESTS, *rest) if name in (arguments.only or (TESTS, *PARTS))]
    out = os.environ.get("OUT")
    folder, logs = (Path(out), Path(out)) if out else (RESULTS, ROOT / "build")
    logs.mkdir(parents=True, exist_ok=True)
    started_s = monotonic()
    with (
        tempfile.TemporaryDirectory() as temporary,
        (logs / "gpu.log").open("w", encoding="utf-8") as log,
    ):
        session = Session(arguments.rehearse, log, Path(temporary), started_s + BUDGET_S)
        for name in order:
            session.run(name)
        session.close(folder)
    print(f"{monotonic() - started_s:.0f} s in all; {'passed' if session.is_right else 'FAILED'}")
    return 0 if session.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
