"""Tests of errors in steps: `join()` raises them with their place, and all threads end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.cadences import cadence_for
from flowdp import (
    DataError,
    FailureOptions,
    FlowdpError,
    Run,
    RuntimeOptions,
    StepError,
    Trainer,
    current_worker,
)
from flowdp.engine.meter import Meter
from tests.fakes import FakeEvent
from tests.limits import HANG_S

pytestmark = pytest.mark.usefixtures("lanes")

POLICIES = ["sync", "cadence", "async"]
SAMPLES, BATCH = 240, 2


class Broken(Exception):
    """The error raised by the user's code."""


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def start(policy: str = "cadence", devices: int = 2, loss: Callable[..., Any] = mse, **options: Any) -> Run:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "optimizer": lambda params: torch.optim.SGD(params, 1e-6),
        "dataset": (torch.arange(SAMPLES).float().unsqueeze(1), torch.ones(SAMPLES, 1)),
        "per_device_batch_size": BATCH,
        "epochs": 3,
        "cadence": cadence_for(policy, anchor=3, max_anchor=3),
    } | options
    if isinstance(given["dataset"], DataLoader):
        del given["per_device_batch_size"]
    return Trainer(loss=loss, policy=policy, devices=devices, **given).start()


def failure_of(run: Run) -> FlowdpError:
    """The failure, raised in time to every caller, with no thread left."""
    began = perf_counter()
    with pytest.raises(FlowdpError) as caught:
        run.join(HANG_S)
    spent = perf_counter() - began
    with pytest.raises(FlowdpError) as again:
        run.join()
    with pytest.raises(FlowdpError) as read:
        list(run.metrics())
    assert caught.value is again.value is read.value is run.error
    assert run.done
    assert run.state is None
    assert run.status().phase == "failed"
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-")] == []
    assert spent < HANG_S / 2, "2 s after the failure, in a run of some milliseconds"
    return caught.value


def is_at(rank: int, step: int) -> bool:
    worker = current_worker()
    return worker.rank == rank and worker.local_step == step


# ---------------------------------------------------------------- user code in a step
def raising(rank: int) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if is_at(rank, 4):
            raise Broken("loss")
        return mse(model, batch)

    return {"loss": loss}


def leaving(rank: int) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if is_at(rank, 4):
            raise SystemExit(3)
        return mse(model, batch)

    return {"loss": loss}


def raising_in_backward(rank: int) -> dict[str, Any]:
    def refuse(gradient: Tensor) -> Tensor:
        if is_at(rank, 4):
            raise Broken("backward")
        return gradient

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        value.register_hook(refuse)
        return value

    return {"loss": loss}


class RefusingSGD(torch.optim.SGD):
    """Raises in a step of one rank."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, lr=1e-6)
        self.rank = rank

    def step(self, closure: Any = None) -> Any:
        if is_at(self.rank, 4):
            raise Broken("optimizer")
        return super().step(closure)


def raising_in_the_optimizer(rank: int) -> dict[str, Any]:
    return {"optimizer": lambda params: RefusingSGD(params, rank)}


def changing_shape(rank: int) -> dict[str, Any]:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            if is_at(rank, 4):
                self.seen = torch.zeros(3)
            return super().forward(x)

    return {"model": Growing}


@pytest.mark.parametrize(("policy", "devices"), list(zip(POLICIES, (2, 1, 4), strict=False)))
@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (raising, Broken),
        (leaving, SystemExit),
        (raising_in_backward, Broken),
        (raising_in_the_optimizer, Broken),
        (changing_shape, FlowdpError),
    ],
)
def test_a_step_that_fails_on_one_rank(
    trouble: Callable[[int], dict[str, Any]], cause: type[BaseException], devices: int, policy: str
) -> None:
    rank = devices - 1
    error = failure_of(start(policy, devices, **trouble(rank)))
    assert isinstance(error, StepError)
    assert isinstance(error.__cause__, cause)
    assert (error.rank, error.device, error.epoch) == (rank, "cpu", 0)
    assert error.step == 4 or (cause is FlowdpError and error.step > 4)  # found at the next averaging
    assert len(error.indices) == BATCH
    assert set(error.indices) <= set(range(SAMPLES))
    for part in (f"rank {rank} on cpu", "epoch 1", "indices ", type(error.__cause__).__name__):
        assert part in str(error)


@pytest.mark.parametrize("policy", ["cadence"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model(batch[0]),
        lambda model, batch: 0.5,
        lambda model, batch: None,
        lambda model, batch: batch[0].mean(),
    ],
    ids=["no scalar", "no tensor", "nothing", "independent"],
)
def test_what_is_no_loss_fails_at_the_first_step(loss: Callable[..., Any], policy: str) -> None:
    error = failure_of(start(policy, 2, loss))
    assert isinstance(error, StepError)
    assert error.step == 0
    assert isinstance(error.__cause__, TypeError | ValueError)


def test_the_indices_are_those_of_the_batch() -> None:
    failed: list[list[int]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if is_at(1, 4):
            failed.append(batch[0].long().flatten().tolist())
            raise Broken("loss")
        return mse(model, batch)

    error = failure_of(start(loss=loss))
    assert isinstance(error, StepError)
    assert [list(error.indices)] == failed
    assert f"indices {failed[0][0]}, {failed[0][1]}" in str(error)


# ---------------------------------------------------------------- the dataset
class Cracked(Dataset[Any]):
    """Cannot read one of its samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 77:
            raise Broken(f"sample {index}")
        return torch.tensor([float(index)]), torch.ones(1)


class CrackedBatches:
    """Cannot read one of its batches."""

    def __len__(self) -> int:
        return SAMPLES

    def get_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        if 77 in indices:
            raise Broken("batch")
        return torch.tensor(indices).float().unsqueeze(1), torch.ones(len(indices), 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("devices", "dataset"), [(1, Cracked()), (4, CrackedBatches())])
def test_a_dataset_that_raises(dataset: Any, devices: int, policy: str) -> None:
    error = failure_of(start(policy, devices, dataset=dataset))
    assert isinstance(error, DataError)
    assert isinstance(error.__cause__, Broken)
    assert error.epoch == 0
    assert 77 in error.indices
    assert len(error.indices) == BATCH


@pytest.mark.parametrize("policy", ["sync"])
def test_a_dataset_that_raises_in_another_process(policy: str) -> None:
    error = failure_of(start(policy, 2, dataset=DataLoader(Cracked(), 2 * BATCH, num_workers=2)))
    assert isinstance(error, DataError)
    assert isinstance(error.__cause__, Broken)  # torch raises a new one, with the process's traceback as text
    assert error.indices == (76, 77)


# ---------------------------------------------------------------- queries in a step
def test_the_worker_of_a_step() -> None:
    seen: list[tuple[int, int, int, int, int, bool]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = current_worker()
        owns = worker.model is model and worker.device == batch[0].device
        seen.append((worker.epoch, worker.round, worker.local_step, worker.global_step, worker.samples, owns))
        return mse(model, batch)

    data = (torch.ones(7, 1), torch.ones(7, 1))
    start("sync", 1, loss, dataset=data, epochs=2, max_steps=6).join()
    assert [(epoch, samples) for epoch, _, _, _, samples, _ in seen] == [
        (0, 2), (0, 2), (0, 2), (0, 1), (1, 2), (1, 2),
    ]  # fmt: skip
    assert [local for _, _, local, _, _, _ in seen] == list(range(6))
    assert [position for _, _, _, position, _, _ in seen] == list(range(6))
    assert all(owns for *_, owns in seen)
    rounds = [number for _, number, *_ in seen]
    assert rounds[0] == -1
    assert rounds == sorted(rounds)


# ---------------------------------------------------------------- waits of the host
class Drains:
    """Counts the waits of workers that leave their devices idle: for events, and for numbers as objects.

    Attributes:
        count: Waits in rounds; a rank without orders is idle anyway.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._is_idle = threading.local()
        synchronize, settle, item = FakeEvent.synchronize, Meter.settle, Tensor.item

        def watched(event: FakeEvent) -> None:
            compute, host = event.cuda.current_stream(), event.cuda.host
            is_last = event.clock.get(compute.number) == compute.time
            self._note(is_last and host.get(compute.number, -1) < compute.time)
            synchronize(event)

        def asked(tensor: Tensor) -> Any:
            self._note(True)
            return item(tensor)

        def settled(meter: Meter) -> None:
            self._is_idle.here = True
            settle(meter)
            self._is_idle.here = False

        monkeypatch.setattr(FakeEvent, "synchronize", watched)
        monkeypatch.setattr(Tensor, "item", asked)
        monkeypatch.setattr(Meter, "settle", settled)

    def _note(self, waits: bool) -> None:
        is_worker = threading.current_thread().name.startswith("flowdp-worker")
        if waits and is_worker and not getattr(self._is_idle, "here", False):
            with self._lock:
                self.count += 1


EXACT: dict[str, Any] = {
    "batch_size": 2 * BATCH,
    "runtime": RuntimeOptions(partition_ratios=[0.5, 0.5]),
    "failures": FailureOptions(check_loss=False),
}
FP16 = {"precision": "fp16", "max_grad_norm": 1.0}


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 1e-6, fused=True)


@pytest.mark.parametrize("lanes", ["streams"], indirect=True)
@pytest.mark.parametrize(
    ("policy", "options", "rounds", "drains"),
    [
        ("sync", {}, 100, 0),
        ("sync", {"failures": FailureOptions(on_nan="raise")}, 100, 0),
        ("exact", EXACT, 100, 0),
        ("exact", EXACT | FP16 | {"optimizer": fused}, 100, 0),
        ("exact", EXACT | FP16, 100, 200),  # the scaler asks whether a gradient has overflowed
        ("sync", {"failures": FailureOptions(on_nan="raise", on_failure="continue")}, 100, 200),
        ("cadence", {}, 0, 0),
        ("async", {}, 0, 0),
    ],
)
def test_the_host_does_not_wait_for_a_device_that_has_nothing_else_to_do(
    policy: str, options: dict[str, Any], rounds: int, drains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Drains(monkeypatch)
    steps = 100 if policy == "exact" else 200
    run = start(policy, epochs=None, max_steps=steps, **options)
    run.join(HANG_S)
    # A rank that reaches the end of an epoch without a step is idle in the gate.
    spare = 0 if rounds else 20
    assert drains <= counted.count <= drains + spare
