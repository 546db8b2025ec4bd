from __future__ import annotations

import time

import pytest
import torch

from bench.gpu.part import Clock, Figure, Finding, Findings, Note, Place, Skipped, timed_ms
from bench.harness import Comparison

CPU = Place(torch.device("cpu"))


def test_findings_go_through_a_file() -> None:
    found: list[Finding] = [
        Figure("bandwidth, GB/s", 4.5),
        Comparison("step", "ms", ("flowdp", "hand"), (1.0, 2.0), (2.0, 2.5)),
        Note("two ranks: right"),
    ]
    read = Findings()
    for finding in found:
        read.add_line(Findings.line(finding))
    assert (read.figures, read.notes) == ({"bandwidth, GB/s": 4.5}, ["two ranks: right"])
    assert read.comparisons == [found[1]]
    assert read.comparisons[0].ratio == pytest.approx((1.0 / 2.0 + 2.0 / 2.5) / 2)


def test_a_clock_leaves_out_the_warm_up_and_what_follows() -> None:
    clock = Clock(CPU, steps=5, warmup=3)
    at = []
    while not clock.is_over:
        clock.tick()
        at.append(time.perf_counter())
    assert len(at) == clock.calls == 9
    assert (at[7] - at[3]) * 1e3 / 5 <= clock.ms <= (at[8] - at[2]) * 1e3 / 5
    clock.tick()  # steps not yet finished


def test_a_clock_that_has_not_seen_all_gives_no_time() -> None:
    clock = Clock(CPU, steps=5, warmup=0)
    clock.tick()
    with pytest.raises(RuntimeError, match="5 of 6 steps were never taken"):
        _ = clock.ms


def test_the_median_ignores_the_warm_up() -> None:
    calls: list[int] = []
    busy = torch.ones(200, 200)

    def work() -> None:
        calls.append(1)
        for _ in range(20 if len(calls) <= 3 else 0):
            busy @ busy

    assert timed_ms(CPU, work, repeats=5, warmup=3) < 1.0
    assert len(calls) == 8


def test_a_place_without_cuda() -> None:
    assert (CPU.is_cuda, CPU.pick("full", "tiny")) == (False, "tiny")
    assert Place(torch.device("cuda", 0)).pick("full", "tiny") == "full"
    CPU.wait()
    with pytest.raises(Skipped, match="NCCL needs a CUDA"):
        CPU.needs_cuda("NCCL")
