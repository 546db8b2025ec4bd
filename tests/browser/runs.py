"""Short real runs with a timeline, for pages and traces."""

from __future__ import annotations

import torch
from torch import nn

import flowdp

__all__ = ["timed_run"]


def timed_run(devices: int, policy: str = "cadence", epochs: int = 2) -> flowdp.Run:
    """A run on so many CPU devices, to its end."""
    torch.manual_seed(0)
    data = torch.randn(512, 8), torch.randn(512, 1)
    run = flowdp.Trainer(
        nn.Linear(8, 1),
        lambda params: torch.optim.SGD(params, lr=0.01),
        nn.MSELoss(),
        policy=policy,  # type: ignore[arg-type]
        dataset=data,
        evaluation=data,
        per_device_batch_size=4,
        epochs=epochs,
        devices=["cpu"] * devices,
        timeline=True,
        progress=False,
    ).start()
    run.timeline.sample(0.5, 1e9, [])  # it may end before the sampler's first one
    run.join()
    run.timeline.sample(1.0, 2e9, [])
    return run
