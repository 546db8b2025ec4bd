"""Lightning: a LightningModule and its Trainer, without bar, logger, checkpoints and summary."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor

from bench.peers.job import Job


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.model = job.model(lambda: self.global_rank)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.job.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    job = Job()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.devices,
        strategy="ddp" if job.devices > 1 else "auto",
        max_steps=job.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(job), job.loader(processes=job.devices))
    if torch.distributed.is_initialized():  # else gloo aborts now and then as the process ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
