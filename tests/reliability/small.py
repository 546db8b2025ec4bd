"""Small runs whose parameters show the samples trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flowdp
from bench.cadences import cadence_for
from flowdp.device.worker_context import CurrentWorker
from tests.limits import HANG_S
from tests.numerics.conftest import Door, StepRecorder

SAMPLES = 23
BATCH = 4
ENDLESS: dict[str, Any] = {"epochs": None, "max_steps": 10**9}


class Counts(nn.Module):
    """One parameter per sample; each step adds the weight of the sample's rank in the mean."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(samples))


def count(model: nn.Module, batch: Any) -> Tensor:
    """A loss for which SGD with a rate of 1 adds 1 for each sample of the batch."""
    own = model.trained[batch[0].flatten()]
    assert isinstance(own, Tensor)
    return -own.sum()


def indices(samples: int = SAMPLES) -> tuple[Tensor]:
    return (torch.arange(samples),)


def trainer(recorder: StepRecorder, policy: Any, devices: int, **options: Any) -> flowdp.Trainer:
    """A run over `SAMPLES` samples with a recorded loss."""
    samples = options.pop("samples", SAMPLES)
    given: dict[str, Any] = {
        "model": Counts(samples),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "loss": recorder.watch(options.pop("loss", count)),
        "dataset": indices(samples),
        "per_device_batch_size": BATCH,
        "epochs": 3,
        "policy": policy,
        # Rounds of a third of an epoch, so that a run can be stopped within it.
        "cadence": cadence_for(policy, anchor=1, max_anchor=1),
        "devices": ["cpu"] * devices,
        "progress": False,
        "runtime": flowdp.RuntimeOptions(
            # By speed one rank might train the rest of an epoch alone, and a stop in it would be at its end.
            partition_ratios=[1] * devices if policy == "exact" and devices > 1 else None,
            tune_process=flowdp.ProcessTuning(openmp=False),
        ),
    }
    if isinstance(options.get("dataset"), DataLoader):
        given["per_device_batch_size"] = options["dataset"].batch_size  # its batches are those of one device
    elif policy == "exact":
        given["batch_size"] = 2 * BATCH  # for any number of devices
    if policy == "exact":
        # `count` is a sum, so that each sample adds the same.
        given["failures"] = flowdp.FailureOptions(check_loss=False)
    return flowdp.Trainer(**given | options)


@contextmanager
def held_at(recorder: StepRecorder, step: int) -> Any:
    """Within the block all ranks are in or before this step, counted over all ranks from 1."""
    door = Door()

    def hold(_: CurrentWorker, number: int) -> None:
        if number >= step:
            door.wait()

    recorder.before = hold

    @contextmanager
    def inside() -> Any:
        assert door.reached.wait(HANG_S)
        try:
            yield
        finally:
            door.opened.set()

    try:
        yield inside
    finally:
        door.opened.set()
        recorder.before = None


def stop(run: flowdp.Run) -> None:
    """Request the end, and wait until all ranks hear of it at their next step, round or batch."""
    run.stop()
    engine, records = run._engine, run._engine.records
    with records._changed:
        assert records._changed.wait_for(lambda: records._taken_requests >= engine._requests._count, HANG_S)


def stop_at(recorder: StepRecorder, step: int, job: flowdp.Trainer) -> flowdp.TrainedState:
    """Run until a step, request the end in the middle of it, and return the run's state."""
    with held_at(recorder, step) as inside:
        run = job.start()
        with inside():
            stop(run)
    return run.join(HANG_S)


class Written:
    """An `on_checkpoint` for which a step can wait, so that each checkpoint is written and none skipped."""

    def __init__(self) -> None:
        self.all: list[flowdp.Checkpoint] = []
        self._changed = threading.Condition()

    def __call__(self, checkpoint: flowdp.Checkpoint) -> None:
        with self._changed:
            self.all.append(checkpoint)
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[flowdp.Checkpoint]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.all), HANG_S)

    def wait_for_step(self, global_step: int) -> None:
        self.wait(lambda all: not global_step or any(one.global_step >= global_step for one in all))


def same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two nested structures of tensors and plain values are equal to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        pairs: Iterable[Any] = ((f"{where}.{key}", value, other[key]) for key, value in one.items())
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        pairs = ((f"{where}[{n}]", *pair) for n, pair in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), (where, one, other)
        return
    else:
        assert one == other, (where, one, other)
        return
    for name, mine, theirs in pairs:
        same(mine, theirs, name)
