"""What a loss may ask and record."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from flowdp.engine.context import CurrentWorker, bind, current_worker, record_scalar


def worker(samples: int = 8) -> CurrentWorker:
    return CurrentWorker(0, torch.device("cpu"), nn.Linear(1, 1), samples=samples)


def test_numbers_count_for_the_samples_of_the_step() -> None:
    mine = worker(8)
    mine.record("accuracy", 0.5)
    mine.samples = 2
    mine.record("accuracy", torch.tensor([1.0]))
    mine.record("length", 3, weight=0.5)
    assert mine.drain() == {"accuracy": (6.0, 10.0), "length": (1.5, 0.5)}
    assert mine.drain() == {}


def test_a_tensor_that_requires_grad_is_recorded_without_a_warning() -> None:
    mine = worker(1)
    mine.record("loss", torch.ones((), requires_grad=True) * 3)
    assert mine.drain() == {"loss": (3.0, 1.0)}


def test_more_than_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'hits'.* one number, not a tensor of shape \(3,\)"):
        worker().record("hits", torch.ones(3))


def test_outside_a_worker() -> None:
    record_scalar("accuracy", 1.0)  # nothing happens, so a loss can be tested alone
    with pytest.raises(RuntimeError, match="this thread is no worker"):
        current_worker()


def test_each_thread_has_its_own_worker() -> None:
    workers = [worker(1), worker(1)]
    both_bound = threading.Barrier(2)
    found: list[CurrentWorker] = []

    def body(mine: CurrentWorker, value: float) -> None:
        bind(mine)
        both_bound.wait(5)
        record_scalar("value", value)
        found.append(current_worker())

    threads = [threading.Thread(target=body, args=(mine, i + 1.0)) for i, mine in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert [mine.drain() for mine in workers] == [{"value": (1.0, 1.0)}, {"value": (2.0, 1.0)}]
    assert all(any(mine is one for one in found) for mine in workers)
