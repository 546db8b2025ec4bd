"""Lightning Fabric: a loop of one's own, the objects set up by Fabric."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from bench.peers.job import Job


def main() -> None:
    job = Job()
    fabric = Fabric(accelerator="cpu", devices=job.devices, strategy="ddp" if job.devices > 1 else "auto")
    fabric.launch()
    model = job.model(lambda: fabric.global_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(job.loader(processes=fabric.world_size))
    step = 0
    while step < job.steps:
        for batch in loader:
            loss = job.loss(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job.steps:
                break


if __name__ == "__main__":
    main()
