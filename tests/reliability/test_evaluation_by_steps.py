"""Evaluations every so many steps, in real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from bench.cadences import cadence_for
from flowdp import CheckpointOptions, EarlyStopping, EvaluationEnded, EvaluationOptions, OptionError, Trainer

torch.manual_seed(2)
X, Y = torch.randn(64, 4), torch.randn(64, 1)


class Heard(flowdp.Callback):
    def __init__(self) -> None:
        self.all: list[EvaluationEnded] = []

    def on_evaluation(self, record: EvaluationEnded) -> None:
        self.all.append(record)


def trainer(policy: Any, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "evaluation": EvaluationOptions((X[:9], Y[:9]), every=6, unit="step"),
        "cadence": cadence_for(policy, anchor=2, max_anchor=2),
    }
    return Trainer(
        nn.Linear(4, 1),
        lambda params: torch.optim.SGD(params, 0.05),
        nn.MSELoss(),
        dataset=(X, Y),
        per_device_batch_size=4,
        epochs=2,
        devices=["cpu"] * 2,
        policy=policy,
        **{**given, **options},
    )


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_each_comes_once_behind_its_step(policy: Any) -> None:
    heard = Heard()
    run = trainer(policy, callbacks=[heard]).start()
    records = list(run.metrics("evaluation"))
    state = run.join()
    assert heard.all == records
    steps = [record.global_step for record in records]
    assert [step // 6 for step in steps] == sorted({step // 6 for step in steps})
    assert len(steps) == state.global_step // 6 or policy in ("cadence", "async")
    if policy == "sync":
        assert steps == [6, 12, 18, 24, 30]
        assert [record.epoch for record in records] == [0, 0, 1, 1, 1]
    assert all(record.eval["loss"] > 0 for record in records)
    assert not any(record.is_evaluated for record in state.history)


def test_a_resumed_run_goes_on_with_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "checkpoint": CheckpointOptions(tmp_path, every=6, unit="step"),
        "resume": True,
    }
    first = trainer("sync", **options).start()
    assert [one.global_step for one in first.metrics("evaluation")] == [6, 12, 18, 24, 30]
    first.join()
    path = min(tmp_path.glob("*.pt"))
    behind = flowdp.load_checkpoint(path).global_step
    again = trainer("sync", resume=path).start()
    assert [one.global_step for one in again.metrics("evaluation")] == [
        step for step in (6, 12, 18, 24, 30) if step > behind
    ]
    again.join()


def test_what_judges_epochs_is_refused(tmp_path: Path) -> None:
    best = CheckpointOptions(tmp_path, keep_best=("loss", "min"))
    for options in ({"callbacks": [EarlyStopping("loss")]}, {"checkpoint": best}):
        with pytest.raises(OptionError, match="EarlyStopping and keep_best judge epochs"):
            trainer("sync", **options)
    with pytest.raises(OptionError, match=r"evaluation.unit must be one of 'epoch', 'step', not 'minute'"):
        EvaluationOptions((X, Y), unit="minute")  # type: ignore[arg-type]
