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
    # The devices share each batch of the loader; under "exact" in one step, else each in a step of its own.
    steps = job.steps if policy == "exact" else job.steps * job.devices
    flowdp.Trainer(
        model=job.model(device_index),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        loss=job.loss,
        dataset=job.loader(processes=1),
        max_steps=steps,
        devices=["cpu"] * job.devices,
        policy=policy,
        progress=False,
    ).fit()


if __name__ == "__main__":
    main()
