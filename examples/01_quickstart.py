"""Two devices, one model, one script: handwritten digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import flowdp

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
run = flowdp.Trainer(
    model=model,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    dataset=(images.float() / 16, labels), batch_size=32, epochs=5, devices=["cpu", "cpu"],
).start()  # fmt: skip
for epoch in run.metrics():  # threads train; read them as they go
    print(epoch)
print(run.join().global_step, "steps; the trained weights are in `model`")
