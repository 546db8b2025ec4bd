"""Handwritten digits in two workers of Ray Train: pip install "ray[train]"."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray import train
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

import flowdp


def work(config: dict[str, Any]) -> None:
    """Train; Ray runs this on each machine, in a process group of torch."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    torch.manual_seed(0)
    run = flowdp.Trainer(
        model=torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=(images.float() / 16, labels),
        batch_size=32,
        epochs=config["epochs"],
        devices=["cpu"],  # leave this out to train on all GPUs that Ray gives the worker
    ).start()
    for epoch in run.metrics():  # the same on all workers
        report(epoch)
    state = run.join()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state.state_dict, Path(folder, "model.pt"))
        is_first = train.get_context().get_world_rank() == 0
        report(run.history[-1], train.Checkpoint.from_directory(folder) if is_first else None)


def report(epoch: flowdp.EpochMetrics, checkpoint: train.Checkpoint | None = None) -> None:
    """Report an epoch to Ray, from all workers; the result has the numbers that came with a checkpoint."""
    samples = [rank.samples for rank in epoch.per_rank]
    train.report({"epoch": epoch.epoch + 1, "loss": epoch.loss, "samples": samples}, checkpoint=checkpoint)


def main(epochs: int = 5) -> train.Result:
    result = TorchTrainer(
        work,
        train_loop_config={"epochs": epochs},
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
    ).fit()
    print(result.metrics)
    print(f"the model is in {result.checkpoint}")
    return result


if __name__ == "__main__":
    main()
