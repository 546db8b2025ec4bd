"""DistributedDataParallel with gloo, started by torchrun: PyTorch's DDP tutorial."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from bench.peers.job import Job


def main() -> None:
    dist.init_process_group("gloo")
    job = Job()
    sampler: DistributedSampler[int] = DistributedSampler(job.dataset())
    loader = job.loader(sampler, processes=dist.get_world_size())
    model = DistributedDataParallel(job.model(dist.get_rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = epoch = 0
    while step < job.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
