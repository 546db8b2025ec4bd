"""Short tests under NVIDIA's compute-sanitizer: memory that one stream frees while another still uses it.

With torch's cudaMallocAsync backend each tensor is an allocation of the driver's, in the order of a stream:
memcheck knows from when to when it lives, and reports a kernel of another stream that no event orders. It
slows each kernel many times, so only a few tests are run, and what was found when the time is over counts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu.part import Figure, Finding, Note, Place, Skipped
from bench.harness import ROOT

__all__ = ["TESTS", "command", "find", "measure", "run", "summary"]

TESTS = ("tests/gpu/test_training.py", "tests/gpu/test_nothing_lost.py")
CHOSEN = (
    "card and not cards and (test_policies and streamed or recurrent or dataset_makes or test_the_others)"
)
LIMIT_S = 210.0
ERRORS = 86
"""Exit code of a sanitizer that has found errors."""

ALLOCATOR = "backend:cudaMallocAsync"
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
    "PYTORCH_ALLOC_CONF": ALLOCATOR,  # its name from torch 2.9 on
}


def find(places: Sequence[Path] = (Path("/usr/local"), Path(sys.prefix))) -> Path:
    """Path of compute-sanitizer: of a CUDA toolkit, or of a wheel of NVIDIA's.

    Raises:
        Skipped: It is not installed.
    """
    there = shutil.which("compute-sanitizer")
    if there:
        return Path(there)
    patterns = (
        "cuda*/bin/compute-sanitizer",
        "cuda*/compute-sanitizer/compute-sanitizer",
        "lib/python3*/site-packages/nvidia/**/compute-sanitizer",
    )
    for place in places:
        for pattern in patterns:
            for path in sorted(place.glob(pattern), reverse=True):  # the newest toolkit
                if path.is_file() and os.access(path, os.X_OK):
                    return path
    raise Skipped("compute-sanitizer is not installed: it comes with NVIDIA's CUDA toolkit")


def command(sanitizer: Path, report: Path, options: Sequence[str]) -> list[str]:
    """The command that runs the tests under the sanitizer."""
    return [
        str(sanitizer), "--tool", "memcheck", "--track-stream-ordered-races", "all",
        "--report-api-errors", "no", "--target-processes", "application-only",
        "--print-limit", "20", "--error-exitcode", str(ERRORS), "--log-file", str(report),
        sys.executable, "-u", "-m", "pytest", *TESTS, *options, "-v",
        "-W", "default", "-o", "faulthandler_timeout=0", "-p", "no:cacheprovider",
    ]  # fmt: skip


def summary(output: str, report: str) -> tuple[int, int, int | None]:
    """Tests that passed, tests that failed, and errors of the sanitizer; None without its summary."""
    passed, failed = (len(re.findall(rf" {word}\b", output)) for word in ("PASSED", "FAILED"))
    found = re.findall(r"ERROR SUMMARY: (\d+) error", report)
    return passed, failed, sum(map(int, found)) if found else None


def run(arguments: Sequence[str], report: Path, limit_s: float) -> tuple[str, str, bool]:
    """Run a command; returns its output, the sanitizer's report, and whether it came to its end in time."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            list(arguments),
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        is_over = True
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_over = False
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    print(text)
    reported = report.read_text(encoding="utf-8", errors="replace") if report.exists() else ""
    print(reported)
    return text, reported, is_over


def measure(place: Place) -> Iterator[Finding]:
    place.needs_cuda("compute-sanitizer")
    sanitizer = find()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        options = ["-m", "gpu", "-k", CHOSEN]
        output, reported, is_over = run(command(sanitizer, report, options), report, LIMIT_S)
    yield from findings(output, reported, is_over)


def findings(output: str, reported: str, is_over: bool) -> Iterator[Finding]:
    """Findings of a run of the sanitizer.

    Raises:
        RuntimeError: It reported errors, no test ran, or one failed.
    """
    passed, failed, errors = summary(output, reported)
    yield Figure("sanitizer: tests passed", passed)
    yield Figure("sanitizer: tests failed", failed)
    if not is_over:
        yield Note(f"sanitizer: the time was over after {passed + failed} tests")
    races = [line.strip("= ") for line in reported.splitlines() if re.search(r"race|Invalid|uninit", line)]
    for line in races[:10]:
        yield Note(f"sanitizer: {line}")
    if errors is not None:
        yield Figure("sanitizer: errors", errors)
    if errors or races or failed:
        raise RuntimeError(
            f"{errors or len(races)} errors of the sanitizer, {failed} failed tests; see the log"
        )
    if not passed:
        raise RuntimeError("no test came to its end under the sanitizer; see the log")
