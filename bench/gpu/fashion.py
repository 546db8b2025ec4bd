"""ResNet-18 on Fashion-MNIST in bf16: accuracy and samples per second of two replicas, beside a hand loop.

The pictures are 32 x 32, by a border of 2. All sides train the same epochs with the same rate and 256 samples
a step, on data that lies on the card; the time is that of the last epoch. `measure` answers whether flowdp
trains a real model as well as a plain loop, not which is faster by a percent: that is `one_device`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.gpu.one_device import gathered
from bench.gpu.part import Figure, Finding, Note, Place, Skipped
from bench.harness import ROOT
from bench.models import resnet18
from bench.quality.tasks import idx

__all__ = ["folder", "load", "measure", "network"]

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
PLACES = (
    Path("/usr/share/datasets/fashion-mnist"),
    ROOT.parent / "shared/data/fashion-mnist",
    ROOT / "shared/data/fashion-mnist",
)
EPOCHS, BATCH_SIZE, RATE = 4, 256, 0.05
LEAST = 85.0
"""Accuracy in percent that all sides must have after these epochs."""

Data = tuple[Tensor, Tensor]


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder with the four files of Fashion-MNIST.

    Raises:
        Skipped: There is none.
    """
    given = environment.get("FLOWDP_FASHION_MNIST")
    for place in [Path(given)] if given else PLACES:
        if all((place / f"{name}-ubyte.gz").is_file() for name in FILES):
            return place
    raise Skipped("Fashion-MNIST is missing: name a folder with its four .gz files in FLOWDP_FASHION_MNIST")


def load(place: Path) -> tuple[Data, Data]:
    """Training and test part: bytes [n, 1, 32, 32] and labels [n]."""
    train, train_labels, test, test_labels = (idx(place / f"{name}-ubyte.gz") for name in FILES)
    bordered = [F.pad(images.unsqueeze(1), (2, 2, 2, 2)) for images in (train, test)]
    return (bordered[0], train_labels.long()), (bordered[1], test_labels.long())


def random_data(samples: int) -> tuple[Data, Data]:
    """Two parts of pictures of noise for a rehearsal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, 1, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (samples,), generator=generator)
    return (x, y), (x[: samples // 4], y[: samples // 4])


def network(width: int) -> nn.Module:
    """ResNet-18 for small pictures of one colour: a first convolution of 3 x 3, and no pooling behind it."""
    first, norm, relu, _, *rest = resnet18(width, classes=10).children()
    assert isinstance(first, nn.Conv2d)
    return nn.Sequential(nn.Conv2d(1, first.out_channels, 3, padding=1, bias=False), norm, relu, *rest)


def floats(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(0.286).div_(0.353)  # the training part's mean and deviation


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(floats(batch[0])), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Percent of the pictures whose class is found."""
    model.eval()
    found = [
        (model(floats(x)).argmax(1) == y).sum() for x, y in zip(*(p.split(500) for p in data), strict=True)
    ]
    return 100 * float(torch.stack(found).sum()) / len(data[1])


def by_hand(place: Place, width: int, train: Data, epochs: int) -> tuple[nn.Module, float]:
    """A trained model, and the samples per second of the last epoch."""
    torch.manual_seed(0)
    model = network(width).to(place.device)
    optimizer = sgd(model.parameters())
    rate = 0.0
    for _ in range(epochs):
        place.wait()
        start_s = perf_counter()
        for batch in gathered(train, BATCH_SIZE):
            with torch.autocast(place.device.type, torch.bfloat16):
                value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        place.wait()
        rate = len(train[0]) / (perf_counter() - start_s)
    return model, rate


def by_flowdp(
    place: Place, width: int, train: Data, epochs: int, policy: Any, ranks: int
) -> tuple[nn.Module, float]:
    """See `by_hand`."""
    torch.manual_seed(0)
    model = network(width)
    sizes: Any = {"batch_size" if policy == "exact" else "per_device_batch_size": BATCH_SIZE}
    state = flowdp.Trainer(
        model,
        sgd,
        loss,
        dataset=train,
        **sizes,
        epochs=epochs,
        devices=[place.device] * ranks,
        policy=policy,
        precision="bf16",
        progress=False,
    ).fit()
    return model.to(place.device), 1e3 * len(train[0]) / state.history[-1].epoch_ms


def measure(place: Place) -> Iterator[Finding]:
    train, test = random_data(600) if not place.is_cuda else load(folder())
    train, test = ((x.to(place.device), y.to(place.device)) for x, y in (train, test))
    width, epochs = place.pick(64, 4), place.pick(EPOCHS, 1)
    sides = {
        "a hand loop": partial(by_hand, place, width, train, epochs),
        "flowdp, exact, 1 device": partial(by_flowdp, place, width, train, epochs, "exact", 1),
        "flowdp, exact, 2 replicas": partial(by_flowdp, place, width, train, epochs, "exact", 2),
        "flowdp, cadence, 2 replicas": partial(by_flowdp, place, width, train, epochs, "cadence", 2),
    }
    faults = []
    for name, side in islice(sides.items(), place.pick(4, 3)):
        try:
            model, rate = side()
        except Exception as fault:  # the other sides tell something, too
            faults.append(f"{name}: {type(fault).__name__}: {fault}")
            yield Note(f"model, {faults[-1]}")
            continue
        share = accuracy(model, test)
        yield Figure(f"model, {name}: accuracy after {epochs} epochs, %", share)
        yield Figure(f"model, {name}: samples/s in the last", rate)
        if place.is_cuda and share < LEAST:
            faults.append(f"{name}: {share:.1f} % of the test part are right")
    if faults:
        raise RuntimeError("; ".join(faults))
