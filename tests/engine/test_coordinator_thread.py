"""Tests of a run's end after errors outside of steps: stuck threads, failures not collected, bugs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from flowdp import (
    FlowdpError,
    ProtocolError,
    Run,
    StepError,
    Trainer,
    current_worker,
)
from flowdp.collective.host import HostMean
from flowdp.device.streams import HostLane
from flowdp.machine.coordinator import Coordinator
from flowdp.protocol.messages import SyncAck
from tests.limits import HANG_S


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[threading.ExceptHookArgs]:
    """Arguments passed to the hook for unhandled exceptions of threads."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    return told


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Releases stuck threads, after the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def start(policy: Any = "cadence", devices: int = 2, loss: Any = mse, **options: Any) -> Run:
    given: dict[str, Any] = {
        "dataset": torch.ones(400, 1),
        "per_device_batch_size": 2,
        "epochs": 2,
    } | options
    return Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, 1e-3),
        loss,
        policy=policy,
        devices=devices,
        **given,
    ).start()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("flowdp-")]


def end(run: Run) -> None:
    """Wait until the run has no threads, without asking for its failure."""
    for thread in threads():
        thread.join(HANG_S)
    assert run.done


# ---------------------------------------------------------------- stuck threads
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_that_is_stuck_while_another_fails(policy: str, release: threading.Event) -> None:
    inside = threading.Event()
    failed_s: list[float] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_worker().rank == 0:
            inside.set()
            release.wait(HANG_S)
        else:
            inside.wait(HANG_S)
            failed_s.append(perf_counter())
            raise ValueError("the other one")
        return mse(model, batch)

    run = start(policy, loss=loss)
    with pytest.raises(StepError, match="the other one") as caught:
        run.join(HANG_S)
    assert perf_counter() - failed_s[0] < HANG_S / 2  # long before the stuck thread continues
    [note] = caught.value.__notes__
    assert note.startswith("flowdp-worker-0 has not left yet")
    assert "release.wait(HANG_S)" in note
    assert run.status().phase == "failed"
    names = {thread.name for thread in threads()}
    assert "flowdp-worker-0" in names
    assert "flowdp-worker-1" not in names
    release.set()
    end(run)
    assert threads() == []
    with pytest.raises(StepError) as again:
        run.join()
    assert again.value is caught.value


def test_leaving_the_block_does_not_wait_for_a_stuck_rank(release: threading.Event) -> None:
    inside = threading.Event()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_worker().rank == 0:
            inside.set()
            release.wait(HANG_S)
            return mse(model, batch)
        inside.wait(HANG_S)
        raise ValueError("the other one")

    began = perf_counter()
    with pytest.raises(StepError, match="the other one"), start(loss=loss) as run:
        run.join()
    assert perf_counter() - began < HANG_S / 2
    release.set()
    end(run)


class Stuck(Dataset[Tensor]):
    """Never returns from reading its samples."""

    def __init__(self, release: threading.Event) -> None:
        self.inside = threading.Event()
        self.release = release

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        self.inside.set()
        self.release.wait(HANG_S)
        return torch.ones(1)


@pytest.mark.parametrize("policy", ["cadence", "async"])  # sync finishes its current round
def test_a_run_can_be_stopped_while_its_dataset_is_stuck(policy: str, release: threading.Event) -> None:
    dataset = Stuck(release)
    run = start(policy, dataset=dataset)
    assert dataset.inside.wait(HANG_S)
    run.stop()
    began = perf_counter()
    state = run.join()
    assert perf_counter() - began < HANG_S / 2  # long before the stuck thread continues
    assert (state.interrupted, state.global_step) == (True, 0)
    assert [thread.name for thread in threads()] == ["flowdp-reader"]
    release.set()
    end(run)


# ---------------------------------------------------------------- failures that are not collected
def failing(gate: threading.Event) -> Any:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        gate.wait(HANG_S)
        raise ValueError("not collected")

    return loss


def test_a_failure_that_nobody_waits_for_is_printed_once(
    unhandled: list[threading.ExceptHookArgs], release: threading.Event
) -> None:
    run = start(loss=failing(release))
    with pytest.raises(TimeoutError):
        run.join(0)  # a caller that left does not count
    release.set()
    end(run)
    [told] = unhandled
    assert told.exc_value is run.error
    assert told.thread is not None
    assert told.thread.name == "flowdp-coordinator"


@pytest.mark.parametrize("how", ["join", "metrics", "block", "a moment late"])
def test_a_failure_that_somebody_waits_for_is_not_printed(
    how: str, unhandled: list[threading.ExceptHookArgs], release: threading.Event
) -> None:
    def release_when_waited_for() -> None:
        if run._engine.records.wait_for_reader(HANG_S):
            release.set()

    def fails() -> None:
        if how == "join":
            run.join()
        elif how == "metrics":
            list(run.metrics("round"))
        elif how == "block":
            with run:
                end(run)
        else:  # as in `fit()` if the first step fails
            release.set()
            run._engine.records.wait(over=True)
            run.join()

    run = start("sync", loss=failing(release))
    watcher = threading.Thread(target=release_when_waited_for)
    watcher.start()
    with pytest.raises(StepError):
        fails()
    watcher.join(HANG_S)
    end(run)
    assert unhandled == []


# ---------------------------------------------------------------- bugs, and full disks
def test_a_bug_of_the_machine_frees_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Coordinator.handle

    def broken(self: Coordinator, fact: Any, now_ms: float) -> Any:
        if isinstance(fact, SyncAck):
            raise ProtocolError("planted")
        return handle(self, fact, now_ms)

    monkeypatch.setattr(Coordinator, "handle", broken)
    run = start("sync")
    with pytest.raises(ProtocolError, match="planted") as caught:
        run.join(HANG_S)
    assert threads() == []
    assert any("WorkerReady" in line for line in caught.value.events)
    assert "The last events:" in str(caught.value)


def test_averaging_beside_the_training_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, round: int, samples: object) -> object:
        raise MemoryError("planted")

    monkeypatch.setattr("flowdp.collective.async_mean.SnapshotMean.average", broken)
    run = start("async")
    with pytest.raises(FlowdpError, match="MemoryError: planted") as caught:
        run.join(HANG_S)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert threads() == []


# ---------------------------------------------------------------- devices after a failure
def broken(model: nn.Module, batch: Tensor) -> Tensor:
    if current_worker().local_step == 3:
        raise ValueError("broken")
    return mse(model, batch)


def test_a_device_that_never_comes_to_rest_does_not_hold_the_failure(
    monkeypatch: pytest.MonkeyPatch, release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def drain(lane: HostLane) -> None:
        if threading.current_thread().name == "flowdp-closing":
            assert release.wait(HANG_S)
            done.append("drained")

    monkeypatch.setattr(HostLane, "drain", drain)
    monkeypatch.setattr(HostMean, "abort", lambda self: done.append("aborted"))
    run = start(loss=broken)
    began = perf_counter()
    with caplog.at_level("WARNING", "flowdp"), pytest.raises(StepError):
        run.join()
    assert perf_counter() - began < HANG_S / 2  # long before the stuck thread continues
    assert done == ["aborted"]
    assert "does not come to rest" in caplog.text
    (closer,) = threads()
    release.set()
    closer.join(HANG_S)
    assert done == ["aborted", "drained", "drained"]
