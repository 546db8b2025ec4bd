"""Tests of the engine: a started run is always joined, and leaves the process as it was."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flowdp import (
    DataError,
    FailureOptions,
    OptionError,
    OutOfDeviceMemory,
    Run,
    StallError,
    StepError,
    Trainer,
    current_worker,
)
from flowdp.collective.nccl import NcclMean
from flowdp.engine import build as build_module
from flowdp.engine import engine as engine_module
from tests.collective.fake_nccl import FakeNccl
from tests.limits import HANG_S

pytestmark = pytest.mark.usefixtures("lanes", "stopped_runs")


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def trainer(loss: Any = mse, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "dataset": torch.ones(400, 1), "per_device_batch_size": 2, "epochs": 2,
        "devices": 2
    } | options  # fmt: skip
    return Trainer(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), loss, **given)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("flowdp-")]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_twenty_starts_and_stops_leave_nothing(tmp_path: Path) -> None:
    trainer().fit()  # objects made once per process
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd")), sys.getswitchinterval(), threading.active_count()
    for number in range(21):
        run = trainer(
            policy=("sync", "cadence", "async")[number % 3],
            epochs=None,
            max_steps=10**9,
        ).start()
        assert sys.getswitchinterval() < before[1]
        run.stop()
        run.join()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), sys.getswitchinterval(), threading.active_count()) == before


@pytest.mark.parametrize("call", ["join", "metrics", "paused"])
def test_a_thread_of_the_run_cannot_wait_for_it(call: str) -> None:
    runs: list[Run] = []
    has_run = threading.Event()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert has_run.wait(HANG_S)
        with runs[0].paused() if call == "paused" else getattr(runs[0], call)():
            pass
        return mse(model, batch)

    runs.append(trainer(loss).start())
    has_run.set()
    with pytest.raises(
        StepError, match=rf"{call}\(\) cannot be called from a loss, a dataset or a callback"
    ) as caught:
        runs[0].join(HANG_S)
    assert isinstance(caught.value.__cause__, OptionError)


def test_a_thread_of_the_run_may_stop_it() -> None:
    runs: list[Run] = []
    has_run = threading.Event()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert has_run.wait(HANG_S)
        if current_worker().local_step == 3:
            runs[0].stop()
        return mse(model, batch)

    runs.append(trainer(loss, epochs=None, max_steps=10**9).start())
    has_run.set()
    assert runs[0].join(HANG_S).interrupted


@pytest.mark.parametrize("lanes", ["streams"], indirect=True)
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_collective_that_hangs_on_the_devices_ends_the_run(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeNccl] = []

    def collective(
        _: Any,
        policy: Any,
        replicas: Any,
        lanes: Any,
        meet: Any,
        outer: Any,
        *_team: Any,
        **_on: Any,
    ) -> NcclMean:
        made.append(FakeNccl(lanes[0].device_module, lanes))
        mean = NcclMean(replicas, lanes, made[0], outer)
        mean._marks[2].done[1].passed = made[0].wake  # of the third round; an abort opens it
        return mean

    monkeypatch.setattr(build_module, "open_collective", collective)
    failures = FailureOptions(stall_timeout=0.5)
    run = trainer(policy=policy, epochs=None, max_steps=10**9, failures=failures).start()
    with pytest.raises(StallError):
        run.join(HANG_S)
    for thread in threads():  # the error is there before the devices are released
        thread.join(HANG_S)
    assert sorted(made[0].aborted) == [0, 1]
    assert made[0].abused == []
    assert threads() == []


class Unpicklable(Dataset[Tensor]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # torch prints it, and raises then
def test_processes_that_cannot_be_started(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    loader = DataLoader(Unpicklable(), 2, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(DataError, match=r"could not be started: TypeError: cannot pickle"):
        trainer(
            dataset=loader,
            per_device_batch_size=None,
        ).start()
    assert threads() == []
    assert sys.getswitchinterval() == interval


# ---------------------------------------------------------------- objects kept by a finished run
@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trainer().fit()  # modules that torch imports for its first optimizer keep their frames
    gc.collect()
    monkeypatch.setattr(engine_module.gc, "collect", lambda: 0)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_a_run_that_was_joined_holds_no_replica(policy: str, no_collector: None) -> None:
    run = trainer(policy=policy).start()
    held = [
        weakref.ref(part)
        for replica in run._engine.replicas
        for part in (replica, replica.module, *replica.optimizers, replica.flat)
    ]
    steps = run.join().global_step
    assert [ref for ref in held if ref() is not None] == []
    count = max if policy == "exact" else sum  # under exact one step is taken by all, or by the first alone
    assert count(run.status().local_steps) == steps
    assert run.join().global_step == steps
    assert "SyncAck" in run.dump()


def first(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


def test_a_run_that_nobody_keeps_is_gone_without_the_collector(no_collector: None) -> None:
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), 4, collate_fn=first)
    run = trainer(dataset=loader, per_device_batch_size=None).start()
    engine = weakref.ref(run._engine)
    run.join()
    del run
    assert engine() is None


def test_a_failed_run_holds_no_replica_once_its_failure_was_heard(no_collector: None) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_worker().local_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mse(model, batch)

    run = trainer(loss).start()
    held = [weakref.ref(replica.module) for replica in run._engine.replicas]
    with pytest.raises(OutOfDeviceMemory):
        run.join()
    assert [ref for ref in held if ref() is not None] == []
    assert run.status().phase == "failed"
    with pytest.raises(OutOfDeviceMemory):
        run.join()


def test_a_failed_run_that_ran_out_of_memory_keeps_no_batch() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        activations = model(batch) * 2
        if current_worker().local_step == 3:
            kept.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return activations.mean()

    run = trainer(loss).start()
    with pytest.raises(OutOfDeviceMemory):
        run.join()
    assert kept
    assert all(ref() is None for ref in kept)
