"""Tests of the worker context: queries and records of a loss."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from flowdp.device import worker_context
from flowdp.device.worker_context import CurrentWorker, bind, current_worker, record_scalar
from tests.limits import HANG_S

Recorded = dict[str, list[tuple[float, float]]]


def worker(samples: int = 8) -> tuple[CurrentWorker, Recorded]:
    recorded: Recorded = {}

    def sink(name: str, value: float | torch.Tensor, weight: float) -> None:
        recorded.setdefault(name, []).append((float(value), weight))

    return CurrentWorker(0, torch.device("cpu"), nn.Linear(1, 1), samples=samples, sink=sink), recorded


def test_numbers_count_for_the_samples_of_the_step() -> None:
    mine, recorded = worker(8)
    mine.record("accuracy", 0.5)
    mine.samples = 2
    mine.record("accuracy", torch.tensor([1.0]))
    mine.record("length", 3, weight=0.5)
    assert recorded == {"accuracy": [(0.5, 8.0), (1.0, 2.0)], "length": [(3.0, 0.5)]}


def test_outside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker_context._local, "worker", raising=False)  # of another test, in this thread
    record_scalar("accuracy", 1.0)  # nothing happens, so a loss can be tested on its own
    with pytest.raises(RuntimeError, match="this thread is no worker"):
        current_worker()


def test_each_thread_has_its_own_worker() -> None:
    workers = [worker(1), worker(1)]
    both_bound = threading.Barrier(2)
    found: list[CurrentWorker] = []

    def body(mine: CurrentWorker, value: float) -> None:
        bind(mine)
        both_bound.wait(HANG_S)
        record_scalar("value", value)
        found.append(current_worker())

    threads = [threading.Thread(target=body, args=(mine, i + 1.0)) for i, (mine, _) in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert [recorded for _, recorded in workers] == [{"value": [(1.0, 1.0)]}, {"value": [(2.0, 1.0)]}]
    assert all(any(mine is one for one in found) for mine, _ in workers)
