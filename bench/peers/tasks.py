"""Models and datasets on which the libraries are compared."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from bench.models import Gpt, classify, small_cnn

__all__ = ["TASKS", "Images", "Task", "Windows"]

DEBIAN = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
IMAGES = 60_000
TOKENS, LENGTH = 96, 64


@dataclass(frozen=True)
class Task:
    """A model, its data and the length of a run.

    Attributes:
        label: Name in tables.
        model: Makes the model.
        dataset: Makes the map-style dataset.
        loss: Function of (model, batch).
        batch_size: Samples of a step on one device; two devices train twice as many in a step.
        steps: Steps of each device in a run.
    """

    label: str
    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    steps: int


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of bytes that are normalised, and in half of the cases mirrored, one at a time."""

    def __init__(self) -> None:
        self.images, self.labels = fashion_mnist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index].unsqueeze(0).float().div_(255).sub_(0.286).div_(0.353)
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[index]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, each character with the one behind it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(0, TOKENS, (200_000,), generator=generator)

    def __len__(self) -> int:
        return len(self.text) - LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.text[index : index + LENGTH], self.text[index + 1 : index + LENGTH + 1]


def fashion_mnist() -> tuple[Tensor, Tensor]:
    """Images [60,000, 28, 28] of bytes and labels [60,000]; random ones where the dataset is not there."""
    folder = Path(os.environ.get("FLOWDP_FASHION_MNIST", DEBIAN))
    if not folder.is_dir():
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (IMAGES, 28, 28), dtype=torch.uint8, generator=generator)
        return images, torch.randint(0, 10, (IMAGES,), generator=generator)
    parts = []
    for name, skip in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(folder / f"train-{name}-ubyte.gz") as file:
            parts.append(torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=skip).copy()))
    return parts[0].view(IMAGES, 28, 28), parts[1].long()


def flat_images() -> TensorDataset:
    """The images as tensors of floats, [60,000, 784]."""
    images, labels = fashion_mnist()
    return TensorDataset(images.view(IMAGES, 784).float() / 255, labels)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def gpt() -> nn.Module:
    return Gpt(layers=2, width=96, heads=4, length=LENGTH, tokens=TOKENS)


def next_character(model: nn.Module, batch: Any) -> Tensor:
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


TASKS = {
    "mlp": Task("MLP, 784-128-10", mlp, flat_images, classify, batch_size=64, steps=1500),
    "cnn": Task("CNN, 28 x 28 images", small_cnn, Images, classify, batch_size=64, steps=150),
    "gpt": Task("GPT, 2 layers, 64 characters", gpt, Windows, next_character, batch_size=16, steps=100),
}
"""By the names of `--model`."""
