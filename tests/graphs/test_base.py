"""Tests of a loss recorded as a graph: objects it may read, and destinations of its values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowdp.device import worker_context
from flowdp.device.worker_context import CurrentWorker, current_worker, record_scalar
from flowdp.graphs.base import NotCaptured, watching

CPU = torch.device("cpu")


def worker() -> CurrentWorker:
    told: list[str] = []
    one = CurrentWorker(0, CPU, nn.Linear(1, 1), samples=3, sink=lambda name, *_: told.append(name))
    worker_context.bind(one)
    return one


def test_recorded_numbers_are_taken_with_their_weights() -> None:
    one = worker()
    sink = one.sink
    with watching(one) as seen:
        record_scalar("accuracy", torch.ones(()))
        current_worker().record("tokens", torch.ones(()), weight=7)
    assert seen.records == [("accuracy", 3.0), ("tokens", 7.0)]
    assert len(seen.values) == 2
    assert one.sink is sink
    assert current_worker() is one


def test_a_number_of_python_is_not_recorded() -> None:
    with watching(worker()), pytest.raises(NotCaptured, match="'lr'"):
        record_scalar("lr", 0.1)


@pytest.mark.parametrize("name", ["epoch", "round", "local_step", "global_step", "lr"])
def test_the_state_of_the_step_is_not_read(name: str) -> None:
    with watching(worker()), pytest.raises(NotCaptured, match=name):
        getattr(current_worker(), name)


@pytest.mark.parametrize("name", ["rank", "device", "model", "samples"])
def test_what_stays_the_same_may_be_read(name: str) -> None:
    one = worker()
    with watching(one):
        assert getattr(current_worker(), name) == getattr(one, name)
