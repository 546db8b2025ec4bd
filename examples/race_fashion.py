"""A race to 93 % of Fashion-MNIST's test images, on one device: loops by hand, Lightning, and flowdp.

    python examples/race_fashion.py                    # on the GPU, where there is one
    python examples/race_fashion.py --data DIR         # the folder of Fashion-MNIST's IDX files
    python examples/race_fashion.py --device cpu --width 8 --samples 10000 --epochs 5 --target 70

All train the same ResNet in bf16 (float32 on the CPU) and channels last, by the same recipe. They differ in
their loops, and each has an order of the images of its own. Time counts from the making of the model, with
the images on the device, and includes all that follows: threads, compilation, evaluation. All train to the
last epoch; the time in the table is that of the first evaluation that reaches the target.
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import racing
import torch
import torch.nn.functional as F
from racing import Batches, Clock, Loss, Result
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import flowdp

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
Data = tuple[Tensor, Tensor]


def idx(folder: Path, name: str) -> Tensor:
    """A file in IDX format: two zero bytes, the type, the number of dimensions, their sizes, the bytes."""
    with gzip.open(folder / f"{name}-ubyte.gz") as file:
        content = file.read()
    dims = content[3]
    shape = np.frombuffer(content, ">i4", dims, offset=4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


@dataclass(frozen=True)
class Recipe:
    """What all contestants share."""

    data: Path
    device: str
    width: int
    epochs: int
    target: float
    samples: int | None
    batch_size: int = 512
    lr: float = 0.1

    def load(self, part: str, samples: int | None = None) -> Data:
        """The images [n, 1, 28, 28], as bytes, and the labels [n], on the device."""
        images, labels = (
            idx(self.data, f"{part}-{name}")[:samples] for name in ("images-idx3", "labels-idx1")
        )
        return images.unsqueeze(1).to(self.device), labels.long().to(self.device)

    def network(self) -> nn.Module:
        """A ResNet of nine layers, after David Page's for CIFAR-10."""
        n = self.width
        layers: Any = nn.Sequential(
            convolution(1, n),
            ChannelsLast(),
            *(convolution(n, 2 * n), nn.MaxPool2d(2), Residual(convolution(2 * n), convolution(2 * n))),
            *(convolution(2 * n, 4 * n), nn.MaxPool2d(2)),
            *(convolution(4 * n, 8 * n), nn.MaxPool2d(2), Residual(convolution(8 * n), convolution(8 * n))),
            *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * n, 10)),
        )
        model: nn.Module = layers.to(memory_format=torch.channels_last)
        return model

    def optimizer(self, params: Any) -> Optimizer:
        fused = self.device != "cpu"
        return torch.optim.SGD(
            params, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=fused
        )


def convolution(inputs: int, outputs: int | None = None) -> nn.Module:
    outputs = outputs or inputs
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Residual(nn.Sequential):
    """Layers with a shortcut around them."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self:
            y = layer(y)
        return x + y


class ChannelsLast(nn.Module):
    """Puts the channels last; behind the first convolution, for with one channel there is no such order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


def normalized(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.286) / 0.353  # the mean and deviation of the training images


def augmented(images: Tensor) -> Tensor:
    """Each image moved by up to two pixels in both directions, and half of them mirrored."""
    n, side, device = len(images), images.shape[-1], images.device
    span = torch.arange(side, device=device)
    top, left = torch.randint(0, 5, (2, n, 1), device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    rows, columns = top + span, left + torch.where(mirrored, span.flip(0), span)
    image = torch.arange(n, device=device)
    bordered = F.pad(images, (2, 2, 2, 2))[:, 0]
    return bordered[image[:, None, None], rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(normalized(augmented(batch[0]))), batch[1], label_smoothing=0.1)


def accuracy(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    found = model(normalized(batch[0])).argmax(1) == batch[1]
    return {"accuracy": 100 * found.float().mean()}


@dataclass(frozen=True)
class Entry:
    """What a contestant is given: it trains all epochs, and calls `lap` with the accuracy after each."""

    recipe: Recipe
    train: Data
    test: Data
    loss: Loss
    lap: Callable[[float], None]

    @property
    def steps(self) -> int:
        """Steps of an epoch; a last batch that is not full is left out."""
        return len(self.train[1]) // self.recipe.batch_size

    def batches(self) -> tuple[Batches, Batches]:
        """Those of the training, shuffled in each epoch, and those of the test."""
        size, samples = self.recipe.batch_size, len(self.train[1])
        return (
            Batches(self.train, size, lambda: torch.randperm(samples)[: self.steps * size]),
            Batches(self.test, size, lambda: torch.arange(len(self.test[1]))),
        )

    def schedule(self, optimizer: Optimizer) -> OneCycleLR:
        steps = self.recipe.epochs * self.steps
        return OneCycleLR(optimizer, self.recipe.lr, steps, pct_start=0.25, cycle_momentum=False)


# ------------------------------------------------------------------ the contestants
def by_hand(entry: Entry) -> None:
    recipe = entry.recipe
    model = recipe.network().to(recipe.device)
    optimizer = recipe.optimizer(model.parameters())
    scheduler = entry.schedule(optimizer)
    train, test = entry.batches()
    for _ in range(recipe.epochs):
        model.train()
        for batch in train:
            with racing.autocast(recipe.device):
                value = entry.loss(model, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        found = torch.zeros((), device=recipe.device)
        for batch in test:
            with torch.no_grad(), racing.autocast(recipe.device):
                found += accuracy(model, batch)["accuracy"] * len(batch[1])
        entry.lap(found.item() / len(entry.test[1]))


def by_lightning(entry: Entry) -> None:
    import lightning

    recipe = entry.recipe

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = recipe.network()

        def training_step(self, batch: Data, _: int) -> Tensor:
            return entry.loss(self.model, batch)

        def on_validation_epoch_start(self) -> None:
            self.found = torch.zeros((), device=self.device)

        def validation_step(self, batch: Data, _: int) -> None:
            self.found += accuracy(self.model, batch)["accuracy"] * len(batch[1])

        def on_validation_epoch_end(self) -> None:
            entry.lap(self.found.item() / len(entry.test[1]))

        def configure_optimizers(self) -> Any:
            optimizer = recipe.optimizer(self.parameters())
            return [optimizer], [{"scheduler": entry.schedule(optimizer), "interval": "step"}]

    trainer = racing.lightning_trainer(recipe.device, max_epochs=recipe.epochs, num_sanity_val_steps=0)
    trainer.fit(Module(), *entry.batches())


def by_flowdp(entry: Entry) -> None:
    recipe = entry.recipe
    run = flowdp.Trainer(
        recipe.network(),
        recipe.optimizer,
        entry.loss,
        dataset=entry.train,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        devices=[recipe.device],
        precision=racing.precision(recipe.device),
        scheduler=flowdp.SchedulerOptions(entry.schedule, unit="step"),
        evaluation=flowdp.EvaluationOptions(entry.test, step=accuracy, sanity_check=0),
        reading=flowdp.ReadingOptions(drop_last=True),
        failures=flowdp.FailureOptions(stall_timeout=None),  # a first step may compile for minutes
        progress=False,
    ).start()
    for epoch in run.metrics():
        entry.lap(epoch.eval["accuracy"])
    run.join()


CONTESTANTS: dict[str, tuple[Callable[[Entry], None], bool]] = {
    "by hand": (by_hand, False),
    "by hand, torch.compile": (by_hand, True),
    "Lightning": (by_lightning, False),
    "flowdp Trainer": (by_flowdp, False),
    "flowdp Trainer, torch.compile": (by_flowdp, True),
}
"""Function of a contestant, and whether augmentation, model and loss are compiled, as one function."""


def run(recipe: Recipe, name: str) -> Result:
    """The result of a contestant, in this process."""
    contestant, is_compiled = CONTESTANTS[name]
    device = racing.prepare(recipe.device)
    train, test = recipe.load("train", recipe.samples), recipe.load("t10k")
    laps: list[tuple[float, float]] = []
    clock = Clock(device)
    own = clock.around(torch.compile(loss) if is_compiled else loss)
    contestant(Entry(recipe, train, test, own, lambda reached: laps.append((clock.seconds(), reached))))
    goal_s = next((at_s for at_s, reached in laps if reached >= recipe.target), None)
    return Result(goal_s, laps[-1][1], clock.begin_s[2], tuple(laps))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    place = Path(os.environ.get("FLOWDP_FASHION_MNIST", DEBIAN))
    parser.add_argument("--data", type=Path, default=place, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--target", type=float, default=93.0, help="percent of the test images")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--samples", type=int, help="train with the first so many images")
    parser.add_argument("--picture", type=Path, default=Path("race_fashion.png"))
    options = vars(parser.parse_args())
    names, picture = racing.installed(options.pop("contestants")), options.pop("picture")
    recipe = Recipe(**options)
    if not recipe.data.is_dir():
        parser.error(
            f"{recipe.data} is no folder: install Debian's package dataset-fashion-mnist, or name by --data"
            " the folder of Fashion-MNIST's four .gz files"
        )

    outcomes = racing.race({name: partial(run, recipe, name) for name in names})
    goal = f"seconds to {recipe.target:g} %"
    print(f"\n{racing.table(outcomes, goal, 'final accuracy, %')}\n")
    title = f"Fashion-MNIST, ResNet-9 of width {recipe.width}, {recipe.epochs} epochs"
    racing.draw(picture, outcomes, title, goal, ("seconds", "test accuracy, %"), recipe.target)


if __name__ == "__main__":
    main()
