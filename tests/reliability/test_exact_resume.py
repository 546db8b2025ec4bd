"""Tests of interrupted and resumed runs: the same bits as without the interruption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import CheckpointOptions
from flowdp.checkpoint.file import read
from flowdp.policy.interval import SaveBudget
from tests.limits import HANG_S
from tests.reliability.small import Written, same

pytestmark = pytest.mark.usefixtures("kept_replicas")

EPOCHS = 2
NUMBERS = torch.randn(42, 5, generator=torch.Generator().manual_seed(1))
DATA = (NUMBERS, NUMBERS.sum(1).sign())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def net(device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1])


CASES: dict[str, dict[str, Any]] = {
    "one device": {"policy": "sync", "devices": 1, "gradient_accumulation_steps": 2},
    "sync, AdamW": {"policy": "sync", "devices": 2, "gradient_accumulation_steps": 2},
    "sync, momentum": {"policy": "sync", "devices": 2, "optimizer": momentum},
    "sync, in its warm-up": {
        "policy": "sync",
        "devices": 2,
        "scheduler": flowdp.SchedulerOptions(warmup_steps=25, lr_scaling="linear"),
    },
    "exact": {
        "policy": "exact",
        "devices": 2,
        "batch_size": 12,
        "runtime": flowdp.RuntimeOptions(partition_ratios=[1, 2]),
    },
}


def make(case: str, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "policy": "cadence",
        "model": net,
        "optimizer": adamw,
        "loss": loss,
        "dataset": DATA,
        "per_device_batch_size": 4,
        "epochs": EPOCHS,
        "max_grad_norm": 1.0,
        "scheduler": flowdp.SchedulerOptions(
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), unit="step"
        ),
        "progress": False,
        "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    }
    return flowdp.Trainer(**given | CASES[case] | options)


def everything(run: flowdp.Run) -> dict[str, Any]:
    """The whole state of every replica of a finished run, and its reported losses."""
    state = run.join(HANG_S)
    return {
        "replicas": [
            {
                "model": dict(replica.module.state_dict()),
                "optimizers": replica.optimizer_states(),
                "rate": replica.learning_rate.state_dict(),
            }
            for replica in run._engine.replicas
        ],
        # Reports, and so the order in which losses are summed, depend on the clock.
        "history": [(one.epoch, round(one.loss, 9), one.lr) for one in state.history],
        "steps": (state.global_step, state.epochs_done, state.interrupted),
    }


@pytest.mark.parametrize(
    ("case", "lanes"), [*((case, "cpu") for case in CASES), ("sync, AdamW", "streams")], indirect=["lanes"]
)
def test_every_position_of_a_run_can_be_resumed_bit_for_bit(
    tmp_path: Path, lanes: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each step has its checkpoint, whatever it costs.
    monkeypatch.setattr(SaveBudget, "free_ms", property(lambda _: -math.inf, lambda *_: None), raising=False)
    whole = everything(make(case).start())
    written = Written()

    def patient(model: nn.Module, batch: Any) -> Tensor:
        written.wait_for_step(flowdp.current_worker().global_step)
        return loss(model, batch)

    every_step = CheckpointOptions(tmp_path, every=1, unit="step", keep_last=10**6)
    same(
        everything(
            make(case, loss=patient, checkpoint=every_step, callbacks=[flowdp.OnCheckpoint(written)]).start()
        ),
        whole,
    )
    steps = [one.global_step for one in written.all]
    assert steps == sorted(set(steps))
    per_round = 2 if case.startswith("sync") else 1
    # The last round of an epoch may have fewer.
    assert len(steps) >= whole["steps"][0] // per_round
    inside = 0
    for checkpoint in written.all:
        inside += bool(read(checkpoint.path)["position"].open)
        resumed = make(case, resume=checkpoint.path).start()
        same(everything(resumed), whole, str(checkpoint))
    assert inside >= len(steps) // 2


def test_what_one_run_has_made_is_gone_on_from_bit_for_bit() -> None:
    whole = everything(make("one device").start())
    first = make("one device", epochs=1).fit()
    resumed = everything(make("one device", resume=first).start())
    same(resumed["replicas"], whole["replicas"])
    assert resumed["steps"] == whole["steps"]
    same(resumed["history"], whole["history"])
