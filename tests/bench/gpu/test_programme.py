"""Tests of the GPU parts on the CPU with tiny sizes: they run, and write their findings to the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import one_device, programme
from bench.gpu.part import Figure, Finding, Findings, Place
from bench.gpu.programme import PARTS, TESTS_LIMIT_S, Part, run
from bench.harness import Comparison

CPU = Place(torch.device("cpu"))

# Findings of each part in a rehearsal; `loader` starts processes and is left to `--rehearse`.
WANTED = {
    "facts": "copy on the device, read + written, GB/s",
    "one_device": "ResNet-18, 8, data there",
    "prefetch": "step with prefetch / compute alone",
    "averaging": "local, 4 x 0.12 M with drift: fraction of copy bandwidth",
    "host": "own code of a step, us",
    "capture": "capture, ranks on one card: 1",
    "nccl1": "nccl1: skipped, NCCL needs a CUDA device",
    "nccl2": "nccl2: skipped, NCCL needs a CUDA device",
    "nccl4": "nccl4: skipped, NCCL needs a CUDA device",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_part_is_rehearsed() -> None:
    assert WANTED.keys() | {"loader"} == PARTS.keys()


def test_the_limits_add_up_to_nine_minutes() -> None:
    assert sum(part.limit_s for part in PARTS.values()) + TESTS_LIMIT_S <= 540


@pytest.mark.parametrize("name", WANTED)
def test_a_part_runs(tmp_path: Path, name: str) -> None:
    run(name, CPU, tmp_path / "found")
    found = Findings()
    for line in (tmp_path / "found").read_text().splitlines():
        found.add_line(line)
    labels = [comparison.label for comparison in found.comparisons]
    assert WANTED[name] in [*found.figures, *labels, *found.notes]
    assert all(value >= 0 for name, value in found.figures.items() if "rest of" not in name)
    assert all(comparison.ratio > 0 for comparison in found.comparisons)


def test_what_was_found_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(place: Place) -> Iterator[Finding]:
        yield Figure("first, ms", 1.0)
        yield Comparison("second", "ms", ("a", "b"), (1.0,), (2.0,))
        raise RuntimeError("no third")

    monkeypatch.setitem(programme.PARTS, "broken", Part(1, lambda: measure))
    with pytest.raises(RuntimeError, match="no third"):
        run("broken", CPU, tmp_path / "found")
    lines = (tmp_path / "found").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["Figure", "Comparison"]


def test_a_loader_without_room_for_processes_reads_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_device.cases(CPU)[0]
    for free, processes in ((0, 0), (1 << 40, 2)):
        monkeypatch.setattr(one_device.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert one_device.worker_processes(CPU, case) == processes
