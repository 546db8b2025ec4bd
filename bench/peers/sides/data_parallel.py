"""torch.nn.DataParallel: on a CPU it calls the module itself, so one device computes the whole batch."""

from __future__ import annotations

import torch

from bench.peers.job import Job, first_device


def main() -> None:
    job = Job()
    loader = job.loader()
    model = torch.nn.DataParallel(job.model(first_device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < job.steps:
        for batch in loader:
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == job.steps:
                break


if __name__ == "__main__":
    main()
