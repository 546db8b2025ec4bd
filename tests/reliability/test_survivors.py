"""Tests of on_failure="continue": a lost rank loses only its steps since its last mean."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flowdp
from bench.cadences import cadence_for
from flowdp import StepError
from tests.limits import HANG_S
from tests.numerics.conftest import Step, StepRecorder
from tests.reliability.small import BATCH, SAMPLES, Counts, Written, count, trainer

ALL = Counter(range(SAMPLES))
POLICIES = ("sync", "cadence")


class Fails:
    """A loss that fails in the step of this number, on each rank named."""

    def __init__(self, step: int, *ranks: int, error: type[Exception] = ValueError) -> None:
        self.step, self.ranks, self.error = step, ranks, error

    def is_there(self) -> bool:
        worker = flowdp.current_worker()
        return worker.rank in self.ranks and worker.local_step >= self.step

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.is_there():
            raise self.error("mine")
        return count(model, batch)


def lost(recorder: StepRecorder, rank: int) -> list[Step]:
    """Steps of a rank that are in no mean: those of its last round, of which the last one failed."""
    steps = recorder.of(rank)
    return [step for step in steps if step.round == steps[-1].round]


def kept(recorder: StepRecorder, epoch: int, *failed: int) -> Counter[int]:
    """How often the samples of an epoch were trained, without the lost steps."""
    gone = Counter(i for rank in failed for s in lost(recorder, rank) if s.epoch == epoch for i in s.indices)
    return recorder.samples(epoch) - gone


def equal(policy: str, devices: int) -> list[float] | None:
    """Equal parts, so that each rank reaches its step, however slow it is."""
    return None if policy == "sync" else [1.0] * devices


@pytest.mark.parametrize(("devices", "rank", "step"), [(2, 0, 0), (2, 1, 5), (3, 1, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_others_train_what_was_lost(
    recorder: StepRecorder, caplog: pytest.LogCaptureFixture, policy: str, devices: int, rank: int, step: int
) -> None:
    model = Counts()
    cadence = cadence_for(policy, anchor=2, max_anchor=2)
    run = trainer(
        recorder,
        policy,
        devices,
        loss=Fails(step, rank),
        model=model,
        failures=flowdp.FailureOptions(on_failure="continue"),
        cadence=cadence,
        runtime=flowdp.RuntimeOptions(partition_ratios=equal(policy, devices)),
        epochs=8,
    ).start()
    with caplog.at_level(logging.ERROR, "flowdp"):
        state = run.join(HANG_S)
    assert (state.epochs_done, state.interrupted, run.error) == (8, False, None)
    for epoch in range(8):
        assert kept(recorder, epoch, rank) == ALL
    [problem] = run.status().problems
    assert problem.startswith(f"rank {rank} left: rank {rank} on cpu failed in epoch")
    assert any(f"rank {rank} has left, and the others go on" in one for one in caplog.messages)
    for record in state.history:
        assert sum(part.samples for part in record.per_rank) == SAMPLES
        assert sum(part.steps for part in record.per_rank) == 6
    # The result is the survivors', in which every sample counts in each epoch.
    assert torch.equal(model.trained, state.state_dict["trained"])
    assert state.state_dict["trained"].min() >= 8 / devices - 1e-3


def test_in_sync_every_step_has_left_its_mark_just_once(recorder: StepRecorder) -> None:
    # 12 batches of 2: the rank fails in the third round of three ranks, and two train the rest.
    run = trainer(
        recorder,
        "sync",
        3,
        samples=24,
        per_device_batch_size=2,
        loss=Fails(2, 1),
        failures=flowdp.FailureOptions(on_failure="continue"),
        epochs=1,
    ).start()
    state = run.join(HANG_S)
    weight = {index: 1 / 3 for step in recorder.steps if step.round < 1 for index in step.indices}
    third = [step for step in recorder.steps if step.round == 1 and step.rank != 1]
    weight |= {index: 1 / 2 for step in third for index in step.indices}
    marks = state.state_dict["trained"]
    assert len(weight) == 16
    for index in range(24):
        assert marks[index].item() == pytest.approx(weight.get(index, 1 / 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_after_the_other_and_the_last_one_ends_the_run(recorder: StepRecorder, policy: str) -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        worker = flowdp.current_worker()
        if worker.local_step >= 2 + 3 * worker.rank:
            raise ValueError(f"mine, of rank {worker.rank}")
        return count(model, batch)

    run = trainer(
        recorder,
        policy,
        3,
        loss=fails,
        failures=flowdp.FailureOptions(on_failure="continue"),
        epochs=None,
        max_steps=10**6,
    ).start()
    with pytest.raises(StepError, match="mine, of rank") as caught:
        run.join(HANG_S)
    told = [problem[:12] for problem in run.status().problems]
    assert told == [f"rank {rank} left:" for rank in range(3) if rank != caught.value.rank]


@pytest.mark.parametrize(("policy", "read"), [("sync", False), ("cadence", True)])
def test_the_survivors_keep_checkpoints_and_can_be_resumed(
    tmp_path: Path, recorder: StepRecorder, policy: str, read: bool
) -> None:
    written = Written()
    options: dict[str, Any] = {
        "checkpoint": tmp_path,
        "failures": flowdp.FailureOptions(on_failure="continue"),
    }
    if read:
        options["dataset"] = Rows()
    state = trainer(
        recorder, policy, 2, loss=Fails(1, 0), callbacks=[flowdp.OnCheckpoint(written)], epochs=2, **options
    ).fit()
    assert written.all[-1].global_step == state.global_step
    resumed = trainer(recorder, policy, 2, resume=True, **options).fit()
    assert resumed.epochs_done == 3
    assert recorder.samples(2) == ALL


# ---------------------------------------------------------------- batches read, not gathered
class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (index,)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((index,) for index in range(SAMPLES))


READ: dict[str, Callable[[], Any]] = {
    "rows": Rows,
    "stream": Stream,
    "loader": lambda: DataLoader(Rows(), BATCH, shuffle=True),
    "processes": lambda: DataLoader(Rows(), BATCH, num_workers=2),
    "stream of a process": lambda: DataLoader(Stream(), BATCH, num_workers=1),
}


class Trips(torch.autograd.Function):
    """Fails in the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("mine")


class Stumbling(torch.optim.SGD):
    """Fails in a step of a rank."""

    def __init__(self, params: Any, fails: Fails | None) -> None:
        super().__init__(params, lr=1.0)
        self.fails = fails

    def step(self, closure: Any = None) -> Any:
        if self.fails is not None and self.fails.is_there():
            raise ValueError("mine")
        return super().step(closure)


@pytest.mark.parametrize(
    ("lanes", "policy", "read", "place", "step", "devices", "rank"),
    [
        ("cpu", "sync", "rows", "forward", 0, 2, 0),
        ("streams", "cadence", "rows", "backward", 1, 3, 1),
        ("streams", "sync", "rows", "step", 5, 2, 1),
        ("streams", "sync", "loader", "backward", 2, 2, 0),
        ("cpu", "sync", "stream", "forward", 0, 3, 1),
        ("streams", "cadence", "stream", "step", 4, 2, 1),
        ("cpu", "cadence", "processes", "forward", 3, 2, 0),
        ("streams", "sync", "stream of a process", "backward", 1, 2, 1),
    ],
    indirect=["lanes"],
)
def test_what_was_read_is_trained_by_the_others(
    recorder: StepRecorder,
    lanes: str,
    policy: str,
    read: str,
    place: str,
    step: int,
    devices: int,
    rank: int,
) -> None:
    fails = Fails(step, rank)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if place == "forward":
            return fails(model, batch)
        value = count(model, batch)
        return Trips.apply(value) if place == "backward" and fails.is_there() else value

    model = Counts()
    dataset = READ[read]()
    run = trainer(
        recorder,
        policy,
        devices,
        loss=loss,
        model=model,
        dataset=dataset,
        optimizer=lambda params: Stumbling(params, fails if place == "step" else None),
        per_device_batch_size=dataset.batch_size if isinstance(dataset, DataLoader) else BATCH,
        failures=flowdp.FailureOptions(on_failure="continue"),
        epochs=4,
        cadence=cadence_for(policy, anchor=2, max_anchor=2),
        runtime=flowdp.RuntimeOptions(partition_ratios=equal(policy, devices)),
    ).start()
    state = run.join(HANG_S)
    assert (state.epochs_done, run.error) == (4, None)
    assert [problem[:12] for problem in run.status().problems] == [f"rank {rank} left:"]
    for epoch in range(4):
        assert kept(recorder, epoch, rank) == ALL
    for record in state.history:
        assert sum(part.samples for part in record.per_rank) == SAMPLES
    assert torch.equal(model.trained, state.state_dict["trained"])
