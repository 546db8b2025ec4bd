"""The main job: one small CNN on two CPU devices, one of them 2.5 times slower than the other.

    python examples/demo.py                       # handwritten digits, which come with scikit-learn
    python examples/demo.py --policy sync         # and the fast device waits for the slow one

It trains on the fast device alone; on both with equal parts of each batch, as under DistributedDataParallel;
and on both with parts by their speed. It says how fast each was, and where the rest of the time went. The
last run is written as a page, `demo.html`, which opens where there is a screen.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flowdp

PAGE = Path("demo.html")
Data = tuple[Tensor, Tensor]


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train, test = digits()
    model = cnn()

    print("the fast device alone:", flush=True)
    alone = trained(copy.deepcopy(model), train, ["cpu"], options)
    print(
        f"both, the second one {options.slowdown:g} times slower, with equal parts of each batch:", flush=True
    )
    equal = trained(copy.deepcopy(model), train, ["cpu", "cpu"], options, is_equal=True)
    print("both, with parts by their speed:", flush=True)
    both = trained(model, train, ["cpu", "cpu"], options)

    print(f"\n{both.run.report()}\n\ntest accuracy {accuracy(model, test):.2%}")
    show(PAGE.absolute())
    print(verdict(alone, equal, both, options.slowdown))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    parser.add_argument("--batch-size", type=int, default=100, help="of all devices; default: 100")
    parser.add_argument("--policy", default="exact", choices=["exact", "sync", "cadence", "async"])
    parser.add_argument("--slowdown", type=float, default=2.5, help="how many times slower device 1 is")
    return parser.parse_args()


def digits() -> tuple[Data, Data]:
    """Training and test part: images [n, 1, 8, 8], labels [n]."""
    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, targets = pixels[order].float().view(-1, 1, 8, 8) / 16, labels[order]
    return (images[:1500], targets[:1500]), (images[1500:], targets[1500:])


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * 4 * 4, 10)),
    )


class SlowRank:
    """A loss for which rank 1 waits, so that its steps take `factor` times as long as the processor computes.

    The wait is in proportion to its samples and to the processor time of its own last step: so it is slower
    by the same factor on any machine, however busy, and takes no core from the fast device.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.samples, self.began_s = 0, 0.0

    def __call__(self, model: nn.Module, batch: Data) -> Tensor:
        images, labels = batch
        if flowdp.current_worker().rank == 1:
            now_s = time.thread_time()
            if self.samples:
                time.sleep((self.factor - 1) * (now_s - self.began_s) / self.samples * len(labels))
            self.samples, self.began_s = len(labels), now_s
        return F.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Trained:
    """A run that is over.

    Attributes:
        run: The run.
        samples_per_s: Of its median epoch.
        loss: Of its last epoch.
    """

    run: flowdp.Run
    samples_per_s: float
    loss: float


def trained(
    model: nn.Module, data: Data, devices: list[str], options: argparse.Namespace, *, is_equal: bool = False
) -> Trained:
    run = flowdp.Trainer(
        model=model,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        loss=SlowRank(options.slowdown),
        dataset=data,
        batch_size=options.batch_size,
        epochs=options.epochs,
        devices=devices,
        policy="exact" if is_equal else options.policy,
        timeline=PAGE if len(devices) > 1 and not is_equal else False,
        progress=False,
        runtime=flowdp.RuntimeOptions(partition_ratios=(1, 1) if is_equal else None),
    ).start()
    for epoch in run.metrics():
        print(epoch, flush=True)
    run.join()
    speeds = [sum(epoch.throughput) for epoch in run.history]
    return Trained(run, median(speeds), run.history[-1].loss or 0.0)


def verdict(alone: Trained, equal: Trained, both: Trained, slowdown: float) -> str:
    """The gain of the second device, the one that was possible, and that of equal parts, in one line."""
    gain, ideal = both.samples_per_s / alone.samples_per_s, 1 + 1 / slowdown
    line = (
        f"With a second device, {slowdown:g} times slower, training is {gain:.2f} times as fast as on the "
        f"first one alone ({ideal:.2f} is possible); with equal parts, as under DistributedDataParallel, "
        f"{equal.samples_per_s / alone.samples_per_s:.2f} times. "
        f"Last losses: {both.loss:.4f}, {alone.loss:.4f}, {equal.loss:.4f}."
    )
    if gain > 0.9 * ideal:
        return line
    return (
        f"{line} The table says where the rest went; both share this machine's cores with all other programs."
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: Data) -> float:
    model.eval()
    return float((model(test[0]).argmax(1) == test[1]).float().mean())


def show(page: Path) -> None:
    """Open the page in a browser where somebody looks at a screen."""
    has_screen = (
        os.name == "nt" or sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    )
    is_open = sys.stdout.isatty() and has_screen and webbrowser.open(page.as_uri())
    print(f"the run as a page{'' if is_open else ', to open in a browser'}: {page.as_uri()}")


if __name__ == "__main__":
    main()
