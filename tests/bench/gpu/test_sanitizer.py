"""Tests of the sanitizer part with a stand-in for the program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.gpu import sanitizer
from bench.gpu.part import Figure, Finding, Note, Skipped

OUTPUT = "tests/gpu/test_x.py::test_a[card] PASSED [ 50%]\ntests/gpu/test_x.py::test_b[card] PASSED [100%]\n"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = (
    "========= COMPUTE-SANITIZER\n========= Stream-ordered race: use after free of 512 bytes\n"
    "========= ERROR SUMMARY: 1 error\n"
)


def test_the_newest_toolkit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda _: None)
    with pytest.raises(Skipped, match="comes with NVIDIA's CUDA toolkit"):
        sanitizer.find([tmp_path])
    for version in ("cuda-12.8", "cuda-13.0"):
        path = tmp_path / version / "bin/compute-sanitizer"
        path.parent.mkdir(parents=True)
        path.touch(0o755)
    assert sanitizer.find([tmp_path]) == tmp_path / "cuda-13.0/bin/compute-sanitizer"


def test_a_clean_run() -> None:
    found = list(sanitizer.findings(OUTPUT, CLEAN, is_over=True))
    assert found == [
        Figure("sanitizer: tests passed", 2),
        Figure("sanitizer: tests failed", 0),
        Figure("sanitizer: errors", 0),
    ]


def test_a_race_ends_the_part_and_is_quoted() -> None:
    found: list[Finding] = []
    with pytest.raises(RuntimeError, match="1 errors of the sanitizer, 0 failed tests"):
        found.extend(sanitizer.findings(OUTPUT, RACE, is_over=True))
    assert Note("sanitizer: Stream-ordered race: use after free of 512 bytes") in found


def test_what_was_found_when_the_time_was_over_counts() -> None:
    found = list(sanitizer.findings(OUTPUT, "", is_over=False))
    assert Note("sanitizer: the time was over after 2 tests") in found
    with pytest.raises(RuntimeError, match="no test came to its end"):
        list(sanitizer.findings("", "", is_over=False))


def test_a_run_has_the_allocator_and_a_limit(tmp_path: Path) -> None:
    report = tmp_path / "report"
    text = (
        "import os, sys; print(os.environ['PYTORCH_CUDA_ALLOC_CONF']); open(sys.argv[1], 'w').write('seen')"
    )
    output, reported, is_over = sanitizer.run([sys.executable, "-c", text, str(report)], report, 60)
    assert (output, reported, is_over) == ("backend:cudaMallocAsync\n", "seen", True)
    hangs = "import threading; print('begun', flush=True); threading.Event().wait()"
    output, reported, is_over = sanitizer.run([sys.executable, "-c", hangs], tmp_path / "none", 3)
    assert (output, reported, is_over) == ("begun\n", "", False)
