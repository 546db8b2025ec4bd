"""Handwritten digits: stopped inside an epoch, resumed on another number of devices, stopped early."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import flowdp


class StopAt(flowdp.Callback):
    """Stops the run after so many steps, as Ctrl-C or SIGTERM would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, run: flowdp.Run) -> None:
        self.run = run

    def on_step(self, worker: Any, _: Tensor | None) -> None:
        if worker.global_step >= self.step:
            self.run.stop()


class Report(flowdp.Callback):
    """Prints what a run has to say."""

    def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
        print(metrics)

    def on_checkpoint(self, checkpoint: flowdp.Checkpoint) -> None:
        print(f"checkpoint at step {checkpoint.global_step}, {checkpoint.epoch} of 50 epochs complete")


def digits() -> tuple[Any, Any]:
    pixels, labels = load_digits(return_X_y=True)
    every = TensorDataset(torch.Tensor(pixels) / 16, torch.tensor(labels))
    train, test = random_split(every, [1500, 297], torch.Generator().manual_seed(0))
    return train[:], test[:]


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def trainer(folder: Path, devices: int, *callbacks: flowdp.Callback) -> flowdp.Trainer:
    """The same script each time: where `folder` has a checkpoint, it goes on from there."""
    train, test = digits()
    torch.manual_seed(0)
    return flowdp.Trainer(
        model=nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=train,
        batch_size=32,
        epochs=50,
        devices=["cpu"] * devices,
        evaluation=flowdp.EvaluationOptions(test, step=accuracy),
        checkpoint=flowdp.CheckpointOptions(folder, keep_last=2, keep_best=("accuracy", "max")),
        resume=True,
        callbacks=[*callbacks, Report()],
    )


def main(folder: Path) -> tuple[flowdp.TrainedState, flowdp.TrainedState]:
    print("two devices")
    first = trainer(folder, 2, StopAt(100)).fit()
    print(f"stopped at step {first.global_step}, in epoch {first.epochs_done + 1}")

    print("three devices")
    patience = flowdp.EarlyStopping("accuracy", patience=3, mode="max", restore_best=True)
    second = trainer(folder, 3, patience).fit()
    best = torch.load(folder / "best.pt", weights_only=True)  # plain torch reads it
    print(f"stopped early at step {second.global_step}; best: {best['best']:.1%} in epoch {best['epoch']}")
    return first, second


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
