"""Handwritten digits on several machines; with one process it trains alone.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or a restart may find the addresses of the life before
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host0:29400 \
        --max-restarts 3 examples/several_machines.py runs/digits

To try it on one host: torchrun --standalone --nproc-per-node 2 examples/several_machines.py runs/digits
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import flowdp

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/digits"

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
torch.manual_seed(0)
state = flowdp.Trainer(
    model=torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    dataset=(images.float() / 16, labels),  # the whole of it, on every machine
    batch_size=32,  # of all devices of all machines together
    epochs=5,
    devices=["cpu", "cpu"],  # leave this out to train on all GPUs of each machine
    checkpoint=folder,
    resume=True,  # after a restart: machine 0 reads, and the others get it from there
).fit()
print(state)
