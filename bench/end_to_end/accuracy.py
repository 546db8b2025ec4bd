"""Does averaging cost accuracy? One model on one device, and on two of different speed, on equal samples.

    python -m bench.end_to_end.accuracy            # 3 seeds x 5 configurations x 4 epochs of Fashion-MNIST
    python -m bench.end_to_end.accuracy --quick    # a look: 1 seed, 1 epoch of 12,000 images

A small CNN with BatchNorm, Adam at 1e-3 with a cosine over the run. Device 1 waits 1.5 times the processor
time of each of its steps, so that it is 2.5 times slower whatever else runs. Time is not measured: only the
steps of each device between two averagings, and the learning rate, matter here.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import flowdp
from bench.harness import commit, machine
from bench.quality.tasks import FASHION, Data, fashion

SLOWDOWN = 2.5
LR = 1e-3
BATCH_SIZE = 64
BAR = 0.5  # allowed loss of mean accuracy against one device, in points


@dataclass(frozen=True)
class Configuration:
    """One row of the table."""

    name: str
    devices: int
    policy: Literal["cadence", "async"]
    lr_scale_ratio: float


ALONE = Configuration("one device", 1, "cadence", 0.0)
TOGETHER = [
    Configuration("cadence, lr x 2", 2, "cadence", 1.0),
    Configuration("async, lr x 2", 2, "async", 1.0),
    Configuration("cadence, lr x 1", 2, "cadence", 0.0),
    Configuration("async, lr x 1", 2, "async", 0.0),
]


@dataclass
class Row:
    """Results of a configuration, one figure per seed."""

    name: str
    accuracy_percent: list[float]
    steps_per_round: list[float]
    share_of_device_0: list[float]

    @property
    def mean_percent(self) -> float:
        """Mean accuracy over the seeds."""
        return round(float(np.mean(self.accuracy_percent)), 2)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    train, test = fashion(options.data, options.samples)
    rows = []
    for configuration in [ALONE, *TOGETHER]:
        row = Row(configuration.name, [], [], [])
        for seed in range(options.seeds):
            run_once(configuration, row, train, test, options.epochs, seed)
            print(f"{row.name}, seed {seed}: {row.accuracy_percent[-1]:.2f} %", flush=True)
        rows.append(row)
    print(table(rows))
    record = {
        "bench": "accuracy",
        "commit": commit(),
        "machine": machine(),
        "samples": len(train[1]),
        "epochs": options.epochs,
        "rows": [asdict(row) | {"mean_percent": row.mean_percent} for row in rows],
    }
    print(json.dumps(record))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=FASHION, help="folder of Fashion-MNIST's IDX files")
    parser.add_argument("--epochs", type=int, help="default: 4")
    parser.add_argument("--seeds", type=int, help="default: 3")
    parser.add_argument("--samples", type=int, help="training images (default: all 60,000)")
    parser.add_argument(
        "--quick", action="store_true", help="the defaults are 1 epoch, 1 seed, 12,000 images"
    )
    options = parser.parse_args()
    epochs, seeds, samples = (1, 1, 12_000) if options.quick else (4, 3, 60_000)
    options.epochs = options.epochs or epochs
    options.seeds = options.seeds or seeds
    options.samples = options.samples or samples
    return options


def cnn() -> nn.Module:
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
        nn.Linear(32 * 7 * 7, 10),
    )


class SlowLoss:
    """The loss, with a wait on rank 1."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # only rank 1 uses it, so no lock

    def __call__(self, model: nn.Module, batch: Data) -> Tensor:
        if flowdp.current_worker().rank == 1:
            # Processor time does not count waits, nor time in which other programs have the core.
            now_s = time.thread_time()
            if self._last_s is not None:
                time.sleep((SLOWDOWN - 1) * (now_s - self._last_s))
            self._last_s = now_s
        return F.cross_entropy(model(batch[0]), batch[1])


def run_once(configuration: Configuration, row: Row, train: Data, test: Data, epochs: int, seed: int) -> None:
    """Train once and add the figures to the row."""
    torch.manual_seed(seed)
    model = cnn()
    steps = epochs * -(-len(train[1]) // BATCH_SIZE)
    state = flowdp.Trainer(
        model=model,
        optimizer=lambda params: torch.optim.Adam(params, lr=LR),
        loss=SlowLoss(),
        dataset=train,
        per_device_batch_size=BATCH_SIZE,
        epochs=epochs,
        devices=["cpu"] * configuration.devices,
        policy=configuration.policy,
        scheduler=flowdp.SchedulerOptions(
            lambda optimizer: CosineAnnealingLR(optimizer, steps),
            unit="step",
            lr_scaling=configuration.lr_scale_ratio,
        ),
        seed=seed,
        progress=False,
        # One thread for each device, on one as on two.
        runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
    ).fit()
    row.accuracy_percent.append(round(100 * accuracy(model, test), 2))
    rounds = sum(epoch.rounds for epoch in state.history)
    row.steps_per_round.append(round(state.global_step / rounds, 1))
    row.share_of_device_0.append(round(float(np.mean([epoch.share[0] for epoch in state.history])), 3))


@torch.no_grad()
def accuracy(model: nn.Module, test: Data) -> float:
    model.eval()
    hits = [(model(x).argmax(1) == y).sum() for x, y in zip(*(part.split(500) for part in test), strict=True)]
    return float(sum(hits)) / len(test[1])


def table(rows: list[Row]) -> str:
    """Rows with the mean accuracy, its difference from the first row, cadence, shares, and every seed."""
    lines = [f"{'':<18}{'mean':>8}{'points':>9}{'steps/round':>13}{'device 0':>10}   seeds"]
    for row in rows:
        points = row.mean_percent - rows[0].mean_percent
        # One device averages nothing: its rounds only deal batches.
        steps = "-" if row is rows[0] else f"{np.mean(row.steps_per_round):.1f}"
        seeds = "  ".join(f"{percent:.2f}" for percent in row.accuracy_percent)
        lines.append(
            f"{row.name:<18}{row.mean_percent:>7.2f}%{points:>+9.2f}{steps:>13}"
            f"{np.mean(row.share_of_device_0):>10.0%}   {seeds}"
        )
    short = [row.name for row in rows if row.mean_percent < rows[0].mean_percent - BAR]
    lines.append(f"more than {BAR} points below {rows[0].name}: {', '.join(short) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
