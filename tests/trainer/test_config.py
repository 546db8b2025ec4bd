"""Tests of the record of a run's settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from flowdp import Trainer


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {
        "batch_size": 2,
        "epochs": 3,
        "devices": 2,
        "progress": False,
    } | options
    return Trainer(
        torch.nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda model, batch: model(batch).mean(),
        dataset=torch.ones(9, 2),
        **given,
    )


def test_settings_cannot_be_changed() -> None:
    own = trainer().config
    with pytest.raises(FrozenInstanceError):
        own.epochs = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "batches", "steps"),
    [
        ({}, 5, 15),
        ({"max_steps": 7}, 5, 7),
        ({"epochs": None, "max_steps": 7}, None, 7),
        ({}, None, None),
        ({"policy": "sync", "gradient_accumulation_steps": 2}, 5, 9),
    ],
)
def test_steps_of_a_run(options: dict[str, Any], batches: int | None, steps: int | None) -> None:
    assert trainer(**options).config.total_steps(batches) == steps


def test_a_source_of_the_settings() -> None:
    source = trainer().config.open_source()
    assert source.batches == 5
    source.close()
    assert trainer().config.open_evaluation() is None
    evaluation = trainer(evaluation=torch.ones(3, 2)).config.open_evaluation()
    assert evaluation is not None
    evaluation.close()
