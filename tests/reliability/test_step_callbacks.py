"""Tests of `Callback.on_step`: called in each step, on the worker's own thread, and nowhere without it."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor

import flowdp
from flowdp import StepError
from flowdp.device.worker_context import CurrentWorker
from tests.limits import HANG_S
from tests.numerics.conftest import StepRecorder
from tests.reliability.small import BATCH, SAMPLES, trainer

POLICIES = ("sync", "cadence", "async", "exact")


class Steps(flowdp.Callback):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, int, int, float]] = []
        self.losses: list[Tensor] = []
        self._lock = threading.Lock()

    def on_step(self, worker: CurrentWorker, loss: Tensor | None) -> None:
        assert flowdp.current_worker() is worker
        worker.record("twice", 2.0)
        if loss is None:  # without a part of the window
            assert worker.samples == 0
            loss = torch.zeros(())
        assert loss.shape == ()
        assert not loss.requires_grad
        own = threading.current_thread().name, worker.rank, worker.epoch, worker.local_step, worker.samples
        with self._lock:
            self.calls.append((*own, float(loss)))


@pytest.mark.parametrize(("lanes", "devices"), [("cpu", 1), ("streams", 3)], indirect=["lanes"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_called_in_every_step_on_the_workers_own_thread(
    recorder: StepRecorder, lanes: str, policy: str, devices: int
) -> None:
    steps = Steps()
    state = trainer(recorder, policy, devices, callbacks=[steps]).fit()
    # Under exact all devices take every step.
    assert len(steps.calls) == state.global_step * (devices if policy == "exact" else 1)
    assert all(name == f"flowdp-worker-{rank}" for name, rank, *_ in steps.calls)
    for rank in range(devices):
        own = [local for _, r, _, local, *_ in steps.calls if r == rank]
        assert own == list(range(1, len(own) + 1))
    trained: Counter[int] = Counter()
    for _, _, epoch, _, samples, _ in steps.calls:
        trained[epoch] += samples
    assert trained == dict.fromkeys(range(3), SAMPLES)
    assert all(epoch.scalars["twice"] == pytest.approx(2.0) for epoch in state.history)
    for epoch in state.history:
        losses = [(samples, loss) for _, _, at, _, samples, loss in steps.calls if at == epoch.epoch]
        mean = sum(samples * loss for samples, loss in losses) / SAMPLES
        assert epoch.loss == pytest.approx(mean, rel=1e-5)


def test_a_step_of_several_batches_is_one_call(recorder: StepRecorder) -> None:
    steps = Steps()
    trainer(recorder, "sync", 2, callbacks=[steps], gradient_accumulation_steps=2, epochs=1).fit()
    assert sorted(samples for *_, samples, _ in steps.calls) == [SAMPLES - 4 * BATCH, 2 * BATCH, 2 * BATCH]


class Fails(flowdp.Callback):
    def on_step(self, worker: CurrentWorker, loss: Tensor | None) -> None:
        if worker.rank == 1 and worker.local_step == 2:
            raise KeyError("wrong")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_is_an_error_of_the_step(recorder: StepRecorder, policy: str) -> None:
    with pytest.raises(StepError, match=r"rank 1 .* KeyError: 'wrong'; in Fails\.on_step") as caught:
        trainer(recorder, policy, 2, callbacks=[Fails()]).start().join(HANG_S)
    assert (caught.value.rank, caught.value.step) == (1, 1)
    assert isinstance(caught.value.__cause__, KeyError)
