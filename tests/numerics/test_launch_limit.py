"""A limit of ranks in their loss at once: it holds, it changes no result, and a place is given back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp import FailureOptions, OptionError, RuntimeOptions, Trainer, current_worker
from flowdp.device.worker_context import CurrentWorker
from tests.limits import HANG_S

pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

ONE = RuntimeOptions(launch_limit=1)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch), batch)


def trainer(loss: Any = mse, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "dataset": torch.ones(48, 1), "per_device_batch_size": 2, "epochs": 1,
        "devices": 2, "runtime": ONE
    } | options  # fmt: skip
    return Trainer(nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), loss, **given)


class Room:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self.inside -= 1


@pytest.mark.parametrize("policy", ["sync", "exact", "async", "cadence"])
def test_a_limit_changes_no_result(policy: str) -> None:
    room = Room()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with room:
            return mse(model, batch)

    def weights(limit: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        data = torch.randn(48, 1)
        ratios = [1, 1, 1] if policy == "exact" else None
        runtime = RuntimeOptions(launch_limit=limit, partition_ratios=ratios)
        return dict(trainer(loss, dataset=data, devices=3, policy=policy, runtime=runtime).fit().state_dict)

    free = weights(None)
    room.most = 0
    limited = weights(1)
    assert room.most == 1 or policy == "exact"  # exact also calls the loss to check it
    if policy in ("sync", "exact"):
        assert all(torch.equal(limited[name], value) for name, value in free.items())


def test_a_step_of_the_users_own_gives_its_place_away_for_its_backward() -> None:
    met, room = threading.Barrier(2), Room()

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            met.wait(HANG_S)  # both ranks are in backward
            return gradient

    def step(worker: CurrentWorker, batch: Tensor) -> None:
        with room:
            loss = Meets.apply(mse(worker.model, batch))
        worker.backward(loss)
        worker.step(worker.optimizers[0])

    trainer(None, train_step=step, policy="sync").fit()
    assert room.most == 1


def test_a_rank_that_fails_gives_its_place_back() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        worker = current_worker()
        if worker.rank == 1 and worker.local_step == 3:
            raise ValueError("of rank 1")
        return mse(model, batch)

    run = trainer(loss, devices=3, failures=FailureOptions(on_failure="continue")).start()
    run.join()
    assert run.status().phase == "done"
    assert any("rank 1 left" in problem for problem in run.status().problems)


def test_forwards_that_meet_are_refused() -> None:
    normed = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed)
    options: Any = {"dataset": torch.ones(64, 1), "per_device_batch_size": 4, "epochs": 1, "devices": 2}
    with pytest.raises(OptionError, match=r"launch_limit .* SyncBatchNorm"):
        Trainer(
            model,
            torch.optim.SGD(model.parameters(), 1e-3),
            lambda model, batch: model(batch).mean(),
            policy="exact",
            runtime=ONE,
            **options,
        ).start()
