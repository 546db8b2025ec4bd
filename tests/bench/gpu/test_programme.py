"""Tests of the GPU parts on the CPU with tiny sizes: they run, and write their findings to the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import one_device, programme
from bench.gpu.part import Figure, Finding, Findings, Place
from bench.gpu.programme import CALL_LIMIT_S, CALLS, PARTS, TESTS, Part, limit_s, run
from bench.harness import Comparison

CPU = Place(torch.device("cpu"))

# Findings of each part in a rehearsal. Those that start processes are left to `--rehearse`.
PROCESSES = {"loader", "launches", "machines", "unequal"}
WANTED = {
    "facts": "copy on the device, read + written, GB/s",
    "one_device": "ResNet-18, 8, data there",
    "loop": "a loop over setup, ResNet-18, 8, a TensorDataset",
    "prefetch": "step with prefetch / compute alone",
    "averaging": "local, 4 x 0.12 M with drift: fraction of copy bandwidth",
    "host": "own code of a step, us",
    "calls": "calls, GPT, setup, captured: host, backward, us",
    "capture": "capture, ranks on one card: 1",
    "nccl1": "nccl1: skipped, NCCL needs a CUDA device",
    "nccl2": "nccl2: skipped, NCCL needs a CUDA device",
    "nccl4": "nccl4: skipped, NCCL needs a CUDA device",
    "policies": "async, 2 replicas, 20 steps: loss away from the CPU's, per mille",
    "compiled": "compiled: skipped, torch.compile against launches needs a CUDA device",
    "drain": "drain, 2 replicas, steps of 5 ms, exact",
    "sanitizer": "sanitizer: skipped, compute-sanitizer needs a CUDA device",
    "evaluation": "evaluation, data on the host",
    "plans": "plans, benchmark: first step of the next run, ms",
    "reading": "reading by a thread",
    "memory": "memory, 97% of the card in use: batches of 64 MiB ahead",
    "checkpoint": "checkpoint, second: standstill, ms",
    "model": "model, flowdp, exact, 2 replicas: samples/s in the last",
    "notebook": "notebook: test accuracy, %",
    "peers": "peers, GPT, flowdp Trainer: times the CUDA graph",
}


SIGNED = re.compile("rest of|first step|a mean under")
"""Figures that are differences."""


def test_every_part_is_rehearsed() -> None:
    assert WANTED.keys() | PROCESSES == PARTS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_the_limits_of_a_call_add_up_to_nine_minutes(call: str) -> None:
    assert sum(map(limit_s, CALLS[call])) <= CALL_LIMIT_S == 540


def test_each_part_belongs_to_one_call() -> None:
    assert sorted(name for call in CALLS.values() for name in call) == sorted([*PARTS, TESTS])


def test_parts_whose_ranks_share_a_card_have_an_environment_for_it() -> None:
    shared = {"nccl2", "nccl4", "machines", "unequal"}
    assert {name for name, part in PARTS.items() if part.environment} == shared


@pytest.mark.parametrize("name", WANTED)
def test_a_part_runs(tmp_path: Path, name: str) -> None:
    run(name, CPU, tmp_path / "found")
    found = Findings()
    for line in (tmp_path / "found").read_text().splitlines():
        found.add_line(line)
    labels = [comparison.label for comparison in found.comparisons]
    assert WANTED[name] in [*found.figures, *labels, *found.notes]
    assert all(value >= 0 for name, value in found.figures.items() if not SIGNED.search(name))
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
