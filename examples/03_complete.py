"""A complete program: all devices, evaluation, the best checkpoint, a progress bar, resume.

Started again, it finds that all is trained; with more epochs, it goes on from there.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import flowdp

pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = pixels.float() / 16
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/complete"

# ------------------------------------------------------------------ the program
trainer = flowdp.Trainer(
    model,
    lambda params: torch.optim.AdamW(params, lr=3e-3),
    nn.CrossEntropyLoss(),
    dataset=train,
    batch_size=32,
    epochs=2,
    evaluation=test,
    checkpoint=flowdp.CheckpointOptions(folder, keep_best=("loss", "min")),
    resume=True,
    progress=True,
)
state = trainer.fit()
print(state.history[-1])
