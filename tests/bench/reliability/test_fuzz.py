"""Tests of the fuzzer: mutated checkpoints are read or refused, and other outcomes are found."""

from __future__ import annotations

import os
import signal
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.reliability.fuzz import MUTATIONS, files, fuzz, mutated
from flowdp.checkpoint.file import read


def test_mutations_are_read_or_refused() -> None:
    report = fuzz(300)
    assert report.failures == []
    assert sum(report.counts.values()) == 300
    assert report.counts["refused"] > 200
    assert report.counts["read with other values"] > 0


def test_half_of_them_have_right_checksums_and_all_can_be_made_again(tmp_path: Path) -> None:
    originals = files(tmp_path)
    made = [mutated(seed, originals) for seed in range(400)]
    assert made == [mutated(seed, originals) for seed in range(400)]
    assert 150 < sum(is_sealed for _, _, is_sealed in made) < 250
    assert sum(content == originals[number] for content, number, _ in made) < 40
    assert len({content for content, _, _ in made}) > 350
    assert len(set(MUTATIONS)) == 8


@pytest.mark.posix
@pytest.mark.parametrize(
    ("what", "said"),
    [("raises", "KeyError: \"'x'\""), ("ends", "the process died"), ("hangs", "no answer for 5")],
)
def test_what_goes_wrong_is_seen_with_its_seed_and_the_rest_read_on(what: str, said: str) -> None:
    calls = []  # the child's own counter: a new process begins at 0

    def reader(path: Path) -> Any:
        calls.append(path)
        if len(calls) == 6:
            if what == "raises":
                raise KeyError("x")
            if what == "hangs":
                threading.Event().wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path)

    # On a busy machine a reader that is well may take long, too: only one that hangs is waited for in vain.
    report = fuzz(10, first=20, hang_s=5.0 if what == "hangs" else 120.0, reader=reader)
    [(seed, happened)] = report.failures
    assert seed == 25
    assert said in happened
    assert sum(report.counts.values()) == 9


def test_a_checksum_that_nobody_looks_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: None)
    report = fuzz(200)
    assert report.failures
    assert all("checksum was not noticed" in happened for _, happened in report.failures)
