"""The main job: one small CNN on two CPU devices, one of them 2.5 times slower than the other.

    python examples/demo.py                       # Fashion-MNIST where it is found, else digits
    python examples/demo.py --data DIR            # the folder of Fashion-MNIST's IDX files
    python examples/demo.py --policy sync         # and the fast device waits for the slow one

It trains with a progress bar, prints how much of their time both devices trained and what they waited for,
and writes the run as a page, `demo.html`, which it opens where there is a screen.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import os
import sys
import time
import webbrowser
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
PAGE = Path("demo.html")
Data = tuple[Tensor, Tensor]


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name, train, test = load(options.data)
    is_large = len(train[1]) > 10_000
    batch_size = options.batch_size or (64 if is_large else 16)
    model = cnn(train[0].shape[-1])
    print(f"{name}: {len(train[1]):,} images, two CPU devices, one {options.slowdown} times slower")

    run = flowdp.Trainer(
        model=model,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        loss=SlowRank(model, (train[0][:batch_size], train[1][:batch_size]), options.slowdown),
        dataset=train,
        per_device_batch_size=batch_size,
        epochs=options.epochs or (1 if is_large else 40),
        devices=["cpu", "cpu"],
        policy=options.policy,
        timeline=PAGE,
        progress=True,
    ).start()
    for epoch in run.metrics():
        print(epoch, flush=True)
    run.join()

    print(f"\ntest accuracy {accuracy(model, test):.2%}")
    show(PAGE.absolute())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--epochs", type=int, help="default: 1 on Fashion-MNIST, 40 on digits")
    parser.add_argument("--batch-size", type=int, help="default: 64 on Fashion-MNIST, 16 on digits")
    parser.add_argument("--policy", default="cadence", choices=["sync", "cadence", "async", "exact"])
    parser.add_argument("--slowdown", type=float, default=2.5, help="how many times slower device 1 is")
    return parser.parse_args()


def load(folder: Path | None) -> tuple[str, Data, Data]:
    """The name of the dataset, its training and its test part: images [n, 1, side, side], labels [n]."""
    if folder is None and not DEBIAN.is_dir():
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, targets = images[order], torch.tensor(labels)[order]
        return "digits", (images[:1500], targets[:1500]), (images[1500:], targets[1500:])
    parts = [
        (idx(folder or DEBIAN, f"{part}-images-idx3"), idx(folder or DEBIAN, f"{part}-labels-idx1"))
        for part in ("train", "t10k")
    ]
    train, test = ((images.unsqueeze(1).float() / 255, labels.long()) for images, labels in parts)
    return "Fashion-MNIST", train, test


def idx(folder: Path, name: str) -> Tensor:
    """A file in IDX format: two zero bytes, the type, the number of dimensions, their sizes, the bytes."""
    with gzip.open(folder / f"{name}-ubyte.gz") as file:
        content = file.read()
    dims = content[3]
    shape = np.frombuffer(content, ">i4", dims, offset=4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def cnn(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 10),
    )


class SlowRank:
    """A loss that is slower on rank 1: it also waits, as long as a step would take `factor` - 1 times."""

    def __init__(self, model: nn.Module, batch: Data, factor: float) -> None:
        probe = copy.deepcopy(model)
        times = []
        for _ in range(20):
            start_s = time.perf_counter()
            F.cross_entropy(probe(batch[0]), batch[1]).backward()
            times.append(time.perf_counter() - start_s)
        self.wait_s = (factor - 1) * sorted(times)[len(times) // 2]

    def __call__(self, model: nn.Module, batch: Data) -> Tensor:
        if flowdp.current_worker().rank == 1:
            time.sleep(self.wait_s)
        logits = model(batch[0])
        flowdp.record_scalar("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return F.cross_entropy(logits, batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, test: Data) -> float:
    model.eval()
    hits = [(model(x).argmax(1) == y).sum() for x, y in zip(*(part.split(500) for part in test), strict=True)]
    return float(sum(hits)) / len(test[1])


def show(page: Path) -> None:
    """Open the page in a browser where somebody looks at a screen."""
    has_screen = (
        os.name == "nt" or sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    )
    is_open = sys.stdout.isatty() and has_screen and webbrowser.open(page.as_uri())
    print(f"the run as a page{'' if is_open else ', to open in a browser'}: {page.as_uri()}")


if __name__ == "__main__":
    main()
