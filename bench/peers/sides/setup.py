"""`flowdp.setup`: the loop by hand with one line more."""

from __future__ import annotations

import threading

import torch

import flowdp
from bench.peers.job import Job


def device_index() -> int:
    """Index of the device whose thread this is."""
    _, _, number = threading.current_thread().name.rpartition("flowdp-replica-")
    return int(number) if number.isdecimal() else 0  # the calling thread compares on the first device


def main() -> None:
    job = Job()
    loader = job.loader()
    model = job.model(device_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = flowdp.setup(model, optimizer, devices=["cpu"] * job.devices)
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
