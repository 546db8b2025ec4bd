"""Tests of launch turns in whole runs: their use, no deadlock, and the run's reports."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp import (
    Callback,
    FailureOptions,
    RuntimeOptions,
    Status,
    Trainer,
    current_worker,
)
from flowdp.device.worker_context import CurrentWorker
from flowdp.policy.launch_limit import LaunchLimit, Window
from flowdp.replica.launch_turns import describe_launching
from flowdp.threads import launch_turn

pytestmark = pytest.mark.usefixtures("lanes")

WAIT_S = 60.0


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def trainer(loss: Any = mse, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "dataset": torch.ones(400, 1), "per_device_batch_size": 2, "epochs": 2,
        "devices": 2
    } | options  # fmt: skip
    return Trainer(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), loss, **given)


class OneAtATime(LaunchLimit):
    """Limits are not measured: one rank launches at a time."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.limit, self.covers_step = 1, True

    def is_enough(self, ms: float, forwards: int) -> bool:
        return False


def test_one_rank_has_no_turn_to_launch() -> None:
    run = trainer(devices=1).start()
    engine = run._engine
    assert engine.turn is None
    assert engine.replicas[0].turn is None
    run.join()


def test_ranks_whose_forwards_meet_have_no_turn_to_launch() -> None:
    normed = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed)
    run = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        lambda model, batch: model(batch).mean(),
        dataset=torch.ones(64, 1),
        policy="exact",
        devices=2,
        per_device_batch_size=4,
        epochs=1,
    ).start()
    assert run._engine.turn is None
    run.join()
    run = trainer(policy="exact").start()
    assert run._engine.turn is not None
    run.join()


@pytest.mark.parametrize("policy", ["sync", "exact", "async", "cadence"])
def test_turns_to_launch_do_not_change_what_is_computed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        value = mse(model, batch)
        inside[0] -= 1
        return value

    def weights() -> dict[str, Tensor]:
        torch.manual_seed(0)
        data = torch.randn(400, 1)
        fixed = {"runtime": RuntimeOptions(partition_ratios=[1, 1, 1])} if policy == "exact" else {}
        return dict(trainer(loss, dataset=data, devices=3, policy=policy, **fixed).fit().state_dict)

    free = weights()
    monkeypatch.setattr(launch_turn, "LaunchLimit", OneAtATime)
    most[0] = 0
    turned = weights()
    assert most[0] == 1 or policy == "exact"  # exact also calls the loss to check it
    if policy in ("sync", "exact"):
        assert all(torch.equal(turned[name], value) for name, value in free.items())


def test_a_step_of_the_users_own_has_a_turn_but_for_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "LaunchLimit", OneAtATime)
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", WAIT_S)
    met, inside, most = threading.Barrier(2), [0], [0]

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            met.wait(WAIT_S)  # both ranks are in backward
            return gradient

    def step(worker: CurrentWorker, batch: Tensor) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        loss = Meets.apply(mse(worker.model, batch))
        inside[0] -= 1
        worker.backward(loss)
        worker.step(worker.optimizers[0])

    run = trainer(None, train_step=step, policy="sync").start()
    run.join()
    assert most[0] == 1
    assert run._engine.turn is not None
    assert run._engine.turn._policy._timeouts == 0


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_losses_that_wait_for_each_other_end_the_turns(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "LaunchLimit", OneAtATime)
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", 0.05)
    met = threading.Barrier(2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_worker().local_step < 5:
            met.wait(WAIT_S)
        return mse(model, batch)

    run = trainer(loss, policy=policy).start()
    run.join()
    assert run._engine.turn is not None
    assert run._engine.turn.limit is None


def test_a_rank_that_fails_in_its_turn_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_turn, "LaunchLimit", OneAtATime)
    monkeypatch.setattr(launch_turn, "TIMEOUT_S", WAIT_S)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        worker = current_worker()
        if worker.rank == 1 and worker.local_step == 3:
            raise ValueError("of rank 1")
        return mse(model, batch)

    run = trainer(loss, devices=3, failures=FailureOptions(on_failure="continue")).start()
    run.join()
    assert run.status().phase == "done"
    assert any("rank 1 left" in problem for problem in run.status().problems)


class Bound(LaunchLimit):
    """Ranks that wait to launch."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.waiting, self.is_bound = 0.38, True

    def is_enough(self, ms: float, forwards: int) -> bool:
        return True

    def seen(self, window: Window) -> None: ...

    def left(self) -> None: ...


def test_a_launch_bound_run_says_so(
    lanes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch_turn, "LaunchLimit", Bound)
    monkeypatch.setattr(launch_turn, "EVERY", 1)
    seen: list[Status] = []

    class Look(Callback):
        def on_train_start(self, run: Any) -> None:
            self.run = run

        def on_epoch_end(self, metrics: Any) -> None:
            seen.append(self.run.status())

    with caplog.at_level(logging.WARNING, "flowdp"):
        trainer(devices=3, callbacks=[Look()], epochs=3).fit()
    assert seen[0].launch_bound == 0.38
    assert "waits to launch 38 %" in str(seen[0])
    (line,) = [record.getMessage() for record in caplog.records if "launching" in record.getMessage()]
    assert "3 ranks spend 38 % of their time" in line
    assert ("larger batches" if lanes == "cpu" else "run.status().capture") in line


def test_a_run_of_one_rank_is_never_launch_bound() -> None:
    run = trainer(devices=1).start()
    run.join()
    assert run.status().launch_bound is None


def test_where_steps_are_captured_the_advice_is_another_one() -> None:
    assert "capture=True" not in describe_launching(0.5, 2, captures=True)
    assert "50 %" in describe_launching(0.5, 2, captures=True)


class Counted(nn.Module):
    """A layer that records how many ranks are in its forward at once."""

    inside, most = 0, 0
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with Counted.lock:
            Counted.inside += 1
            Counted.most = max(Counted.most, Counted.inside)
        y: Tensor = self.layer(x).tanh()
        with Counted.lock:
            Counted.inside -= 1
        return y
