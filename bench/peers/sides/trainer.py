"""`flowdp.Trainer`, by one of its policies."""

from __future__ import annotations

from typing import get_args

import torch

import flowdp
from bench.peers.job import Job
from flowdp.options import Policy


def device_index() -> int:
    """Index of the device whose thread this is."""
    return flowdp.current_worker().rank


def main() -> None:
    job = Job()
    policy = next(name for name in get_args(Policy) if name == job.order.variant)
    exact = policy == "exact"
    # Under "exact" the devices share each batch of the loader; else each of them takes batches of its own.
    flowdp.Trainer(
        model=job.model(device_index),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        loss=job.loss,
        dataset=job.loader(processes=1 if exact else job.devices),
        global_batch_size=job.batch_size * job.devices if exact else None,
        max_steps=job.steps if exact else job.steps * job.devices,
        devices=["cpu"] * job.devices,
        policy=policy,
        progress=False,
    ).fit()


if __name__ == "__main__":
    main()
