"""The models and the data that the benches share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Batch", "Data", "classify", "images", "small_cnn", "small_mlp"]

Batch = tuple[Tensor, Tensor]
Data = tuple[Tensor, Tensor]


def small_mlp() -> nn.Module:
    """784-256-10: 0.2 million parameters, about 0.4 ms a step at batch 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def small_cnn(width: int = 16) -> nn.Module:
    """Two convolutions for 28 x 28, `width` and twice as many channels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 7 * 7, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (small_mlp, 32),
    "cnn": (small_cnn, 64),  # about 9 ms a step on one thread
    "wide cnn": (partial(small_cnn, 32), 64),  # about 20 ms on one thread, 12 on two
}
"""Name -> (factory, batch size)."""


@cache
def images(samples: int) -> Data:
    """The same random images [samples, 1, 28, 28] and labels [samples]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, 28, 28, generator=generator)
    return x, torch.randint(0, 10, (samples,), generator=generator)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
