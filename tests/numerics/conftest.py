"""Shared parts of the tests of numerics: a recorder inside the loss."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import flowdp
from flowdp.device.worker_context import CurrentWorker
from tests.limits import HANG_S

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Step(NamedTuple):
    """A step that was taken."""

    rank: int
    epoch: int
    round: int  # the last one before it
    indices: tuple[int, ...]
    lr: float


class StepRecorder:
    """Records the samples trained by each rank, and when; a batch's first part has their indices."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.before: Callable[[CurrentWorker, int], None] | None = None  # gets the number of steps so far
        self._lock = threading.Lock()

    def watch(self, loss: Loss) -> Loss:
        """The recorded loss."""

        def watched(model: nn.Module, batch: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():  # the check of the first loss is no step
                return loss(model, batch)
            worker = flowdp.current_worker()
            indices = tuple(int(index) for index in batch[0].flatten())
            with self._lock:
                self.steps.append(Step(worker.rank, worker.epoch, worker.round, indices, worker.lr))
                count = len(self.steps)
            if self.before is not None:
                self.before(worker, count)
            return loss(model, batch)

        return watched

    def of(self, rank: int) -> list[Step]:
        """The steps of a rank, in its order."""
        return [step for step in self.steps if step.rank == rank]

    def samples(self, epoch: int) -> Counter[int]:
        """How often each sample was trained in an epoch."""
        return Counter(index for step in self.steps if step.epoch == epoch for index in step.indices)


@pytest.fixture(autouse=True)
def on_both(lanes: str, kept_replicas: None) -> None:
    """Run every test of numerics on the CPU and on streams, and keep its replicas."""


@pytest.fixture
def recorder() -> StepRecorder:
    return StepRecorder()


class Door:
    """Holds every thread that enters it until a test has done something."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(HANG_S)
