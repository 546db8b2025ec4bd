"""A small problem for short runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp

NUMBERS = torch.randn(67, 5, generator=torch.Generator().manual_seed(1))
DATA = (NUMBERS, NUMBERS.sum(1, keepdim=True))
LR = 0.01


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def trainer(**options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "model": net,
        "optimizer": sgd,
        "loss": None if "train_step" in options else loss,
        "dataset": DATA,
        "per_device_batch_size": 4,
        "epochs": 1,
        "devices": ["cpu"],
        "policy": "sync",
        "progress": False,
    }
    return flowdp.Trainer(**given | options)
