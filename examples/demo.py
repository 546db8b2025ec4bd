"""The main job: one small CNN on two CPU devices, one of them 2.5 times slower than the other.

    python examples/demo.py                       # Fashion-MNIST where it is found, else digits
    python examples/demo.py --data DIR            # the folder of Fashion-MNIST's IDX files
    python examples/demo.py --policy async
    python examples/demo.py --busy 8              # beside so many programs that want the cores, too

It ends with a table: who did how much, and what it cost to keep two replicas one model. The yardstick, 100 %,
are the same two devices on the same data without averaging, each as fast as it can. It is measured in turns
with the training, so that both see the same machine, whatever else that does.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
TURN_S, YARDSTICK_S = 1.0, 0.5
Data = tuple[Tensor, Tensor]


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name, train, test = load(options.data)
    is_large = len(train[1]) > 10_000
    batch_size = options.batch_size or (64 if is_large else 16)
    model = cnn(train[0].shape[-1])
    slow = Slowdown(model, train, batch_size, options.slowdown)
    yardstick = Yardstick(model, train, batch_size, slow)
    print(f"{name}: {len(train[1]):,} images, two CPU devices, one {options.slowdown} times slower")
    print(f"Paused each {TURN_S:g} s, to measure both without averaging: epochs with a pause look slow")

    trainer = flowdp.Trainer(
        model=model,
        optimizer=lambda params: torch.optim.Adam(params, lr=2e-3),
        loss=slow.loss,
        dataset=train,
        batch_size=batch_size,
        epochs=options.epochs or (1 if is_large else 40),
        devices=["cpu", "cpu"],
        policy=options.policy,
        progress=True,
    )
    with busy_loops(options.busy), trainer.start() as run:
        turns = threading.Thread(target=yardstick.take_turns, args=(run,))
        turns.start()
        for epoch in run.metrics():
            print(epoch, flush=True)
        state = run.join()
        turns.join()
    report(state, yardstick, accuracy(model, test))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--epochs", type=int, help="default: 1 on Fashion-MNIST, 40 on digits")
    parser.add_argument("--batch-size", type=int, help="default: 64 on Fashion-MNIST, 16 on digits")
    parser.add_argument("--policy", default="cadence", choices=["sync", "cadence", "async"])
    parser.add_argument("--slowdown", type=float, default=2.5, help="how many times slower device 1 is")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside it, in processes of their own")
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


def cross_entropy(model: nn.Module, batch: Data) -> Tensor:
    logits = model(batch[0])
    flowdp.record_scalar("accuracy", (logits.argmax(1) == batch[1]).float().mean())
    return F.cross_entropy(logits, batch[1])


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Other programs, each of which takes what it can get of one core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Slowdown:
    """Makes rank 1 slower: each of its steps also waits, as long as a step would take `factor` - 1 times."""

    def __init__(self, model: nn.Module, data: Data, batch_size: int, factor: float) -> None:
        self.factor = factor
        self.wait_s = 0.0
        steps = Steps(model, data, batch_size, self, rank=0)
        steps.run(20)
        self.wait_s = (factor - 1) * min(steps.run(10) for _ in range(3)) / 10

    def loss(self, model: nn.Module, batch: Data) -> Tensor:
        if flowdp.current_worker().rank == 1:
            time.sleep(self.wait_s)
        return cross_entropy(model, batch)


class Yardstick:
    """Both devices when nobody averages, while the training is paused.

    Attributes:
        training_s: Seconds in which the run was not paused.
        samples_per_s: Of both devices together.
    """

    def __init__(self, model: nn.Module, data: Data, batch_size: int, slow: Slowdown) -> None:
        self.devices = [Steps(model, data, batch_size, slow, rank) for rank in (0, 1)]
        self.training_s = 0.0

    def take_turns(self, run: flowdp.Run) -> None:
        while not run.done:
            start = time.perf_counter()
            with suppress(TimeoutError):
                run.join(timeout=TURN_S)
            with run.paused():
                self.training_s += time.perf_counter() - start
                self.measure()

    def measure(self) -> None:
        threads = [threading.Thread(target=device.run_for, args=(YARDSTICK_S,)) for device in self.devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def samples_per_s(self) -> float:
        return sum(device.samples / device.seconds for device in self.devices)


class Steps:
    """A loop as one writes it by hand, on a copy of the model."""

    def __init__(self, model: nn.Module, data: Data, batch_size: int, slow: Slowdown, rank: int) -> None:
        self.model = copy.deepcopy(model).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.data = data
        self.batch_size = batch_size
        self.slow = slow
        self.rank = rank
        self.samples = 0
        self.seconds = 0.0

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        for index in torch.randperm(len(self.data[1]))[: steps * self.batch_size].split(self.batch_size):
            if self.rank == 1:
                time.sleep(self.slow.wait_s)
            loss = cross_entropy(self.model, (self.data[0][index], self.data[1][index]))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start

    def run_for(self, seconds: float) -> None:
        torch.set_num_threads(1)  # for this thread
        spent = 0.0
        while spent < seconds:
            spent += self.run(10)
            self.samples += 10 * self.batch_size
        self.seconds += spent


@torch.no_grad()
def accuracy(model: nn.Module, test: Data) -> float:
    model.eval()
    hits = [(model(x).argmax(1) == y).sum() for x, y in zip(*(part.split(500) for part in test), strict=True)]
    return float(sum(hits)) / len(test[1])


def report(state: flowdp.TrainedState, yardstick: Yardstick, test_accuracy: float) -> None:
    history = state.history
    samples = [sum(epoch.per_rank[rank].samples for epoch in history) for rank in (0, 1)]
    wall_s = yardstick.training_s
    print(f"\n{'device':<10}{'share':>8}{'samples/s':>12}{'in steps':>10}{'averaging':>11}{'waiting':>10}")
    for rank in (0, 1):
        parts = [epoch.per_rank[rank] for epoch in history]
        busy, sync = (sum(getattr(part, name) for part in parts) / 1e3 for name in ("busy_ms", "sync_ms"))
        print(
            f"{'cpu' + (' slow' if rank else ''):<10}{samples[rank] / sum(samples):>8.1%}"
            f"{samples[rank] / wall_s:>12,.0f}{busy / wall_s:>10.1%}{sync / wall_s:>11.1%}"
            f"{1 - (busy + sync) / wall_s:>10.1%}"
        )
    together = sum(samples) / wall_s
    rounds = sum(epoch.rounds for epoch in history)
    print(f"\ntogether        {together:>10,.0f} samples/s, {state.global_step:,} steps in {rounds:,} rounds")
    print(f"no averaging    {yardstick.samples_per_s:>10,.0f} samples/s (100 %)")
    print(f"efficiency      {together / yardstick.samples_per_s:>10.1%}")
    print(f"test accuracy   {test_accuracy:>10.2%}")
    print(f"time            {wall_s:>9.1f} s")


if __name__ == "__main__":
    main()
