"""Models and data shared by the benches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MODELS",
    "Batch",
    "Data",
    "Gpt",
    "classify",
    "classify_bytes",
    "images",
    "photos",
    "predict_next",
    "resnet18",
    "small_cnn",
    "small_mlp",
    "texts",
]

Batch = tuple[Tensor, Tensor]
Data = tuple[Tensor, Tensor]


def small_mlp() -> nn.Module:
    """784-256-10: 0.2 million parameters, about 0.4 ms per step at batch size 32."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def small_cnn(width: int = 16) -> nn.Module:
    """Two convolutions for 28 x 28 images, with `width` and twice as many channels."""
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


class _Block(nn.Module):
    """A residual block: two 3 x 3 convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def resnet18(width: int = 64, classes: int = 1000) -> nn.Module:
    """ResNet-18: 17 convolutions and a linear layer, 11.7 million parameters at width 64."""
    widths = (width, width, 2 * width, 4 * width, 8 * width)
    blocks = []
    for before, after in pairwise(widths):
        stride = 1 if after == width else 2
        blocks += [_Block(before, after, stride), _Block(after, after, 1)]
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes),
    )  # fmt: skip


class _Layer(nn.Module):
    """Causal self-attention and a perceptron, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.split(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.perceptron(self.norm2(x))
        return out


class Gpt(nn.Module):
    """A language model of `layers` layers, its output tied to its input."""

    def __init__(self, layers: int, width: int, heads: int, length: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        return F.linear(self.layers(x), self.token.weight)


def classify_bytes(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of images as bytes, made floats on the device."""
    return F.cross_entropy(model(batch[0].float().div_(255)), batch[1])


def predict_next(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Loss of texts [batch, length + 1]: each token from those before it."""
    (text,) = batch
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@cache
def photos(samples: int, side: int, classes: int = 1000) -> Data:
    """Random images [samples, 3, side, side] of bytes, the first 256 repeated, and labels."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, 256, (256, 3, side, side), dtype=torch.uint8, generator=generator)
    x = some.repeat(-(-samples // 256), 1, 1, 1)[:samples]
    return x, torch.randint(0, classes, (samples,), generator=generator)


@cache
def texts(samples: int, length: int, tokens: int) -> tuple[Tensor]:
    """Random texts [samples, length + 1]."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, tokens, (samples, length + 1), generator=generator),)
