"""Tests of the soak bench: runs of every kind leave nothing behind, and leftovers are found."""

from __future__ import annotations

import gc
import math
import mmap
import os
from typing import Any

import pytest

import flowdp
from bench.reliability import soak as bench
from bench.reliability.soak import ENDINGS, Report, Sample, soak

SEED = 5  # includes every ending


def test_some_runs_of_every_kind() -> None:
    gc.unfreeze()  # as a run with worker processes does: what was frozen before would count from there on
    report = soak(runs=18, seed=SEED, every=9)
    assert report.faults == []
    assert set(report.endings) >= set(ENDINGS)
    assert len({(one.files, one.objects) for one in report.samples}) == 1


# ---------------------------------------------------------------- leftovers are found
def leaky(monkeypatch: pytest.MonkeyPatch, leak: Any, *, counts: bool = False) -> Report:
    def one(draw: Any, report: Report, folders: Any) -> None:
        report.endings["leaky"] += 1
        leak()

    monkeypatch.setattr(bench, "_one", one)
    return soak(runs=4, every=1) if counts else soak(runs=2)


def test_files_objects_and_memory_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak() -> None:
        files.append(os.open(os.devnull, os.O_RDONLY))
        objects.append(flowdp.ElChe(2))
        # A mapping of its own: freed memory of the tests before must not hide it.
        memory.append(mmap.mmap(-1, 8_000_000))
        memory[-1].write(b"x" * 8_000_000)

    files: list[int] = []
    objects: list[Any] = []
    memory: list[mmap.mmap] = []
    report = leaky(monkeypatch, leak, counts=True)
    for file in files:
        os.close(file)
    assert report.slope_mb > 400
    assert [line.partition(" ")[0] for line in report.verdict()] == ["files", "objects", "memory"]


# ---------------------------------------------------------------- the verdict
def samples(memory: list[float]) -> Report:
    return Report(samples=[Sample(50 * n, 1, 1, 1, mb) for n, mb in enumerate(memory)])


def test_the_first_quarter_is_the_warm_up() -> None:
    report = samples([100.0, 150.0, 200.0, 200.1, 200.0, 200.1, 200.0, 200.1])
    assert abs(report.slope_mb) < 0.1
    assert report.verdict() == []
    assert samples([100.0, 150.0, 200.0, 201.0, 202.0, 203.0, 204.0, 205.0]).slope_mb == pytest.approx(2.0)
    assert math.isnan(samples([100.0, 150.0]).slope_mb)
