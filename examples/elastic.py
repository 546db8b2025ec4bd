"""Handwritten digits on machines that come and go: when one is lost, the others train on.

    pip install "flowdp[torchft]"
    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 2000          # once, on any host
    TORCHFT_LIGHTHOUSE=http://host:29510 python examples/elastic.py runs/elastic    # on each machine

To try it on one host, start the last line in several terminals, and kill one of them.
"""

import os
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import flowdp

if "TORCHFT_LIGHTHOUSE" not in os.environ:
    sys.exit(__doc__)

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))


def train() -> flowdp.TrainedState:
    """Train from the newest checkpoint to the end, with the machines that are there."""
    torch.manual_seed(0)
    return flowdp.Trainer(
        model=torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        dataset=(images.float() / 16, labels),  # the whole of it, on every machine
        batch_size=32,  # of all devices of all machines together
        epochs=int(sys.argv[2]) if len(sys.argv) > 2 else 100,
        devices=["cpu", "cpu"],  # leave this out to train on all GPUs of each machine
        checkpoint=sys.argv[1] if len(sys.argv) > 1 else "runs/elastic",  # on storage that all machines reach
        resume=True,
    ).fit()


print(flowdp.run_elastic(train))
