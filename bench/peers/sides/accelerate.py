"""Accelerate, started by torchrun: the loop of its quick tour."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from bench.peers.job import Job


def main() -> None:
    job = Job()
    accelerator = Accelerator(cpu=True)
    loader = job.loader(processes=accelerator.num_processes)
    model = job.model(lambda: accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while step < job.steps:
        for batch in loader:
            loss = job.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
