"""Every collective by hand: two replicas at a pace of their own, one gradient, El Che's counts."""

from time import perf_counter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import flowdp

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
devices = ["cpu", "cpu"]
cadence = flowdp.ElChe(len(devices), anchor=1, max_anchor=2)


def backward(_rank: int, model: torch.nn.Module, rows: list[torch.Tensor]) -> tuple[float, float]:
    """The mean gradient of a rank's own batches; its loss, and how long it took."""
    start, total = perf_counter(), 0.0
    for index in rows:
        loss = F.cross_entropy(model(images[index]), labels[index]) / len(rows)
        loss.backward()
        total += loss.item()
    return total, (perf_counter() - start) * 1e3


models = [
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)) for _ in devices
]
with flowdp.Ddp.wrap(models, devices) as ddp:
    ddp.sync_params()  # all start from model 0
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    for epoch in range(5):
        batches = list(torch.randperm(len(images)).split(32))
        loss = 0.0
        while batches:
            mine = [[batches.pop() for _ in range(count) if batches] for count in cadence.batch_counts]
            counts = [len(rows) for rows in mine]
            losses, busy_ms = zip(*ddp.parallel(backward, mine), strict=True)
            sync = perf_counter()
            ddp.weighted_all_reduce_gradients(counts)  # the gradient of all these batches, on every replica
            cadence.report_timing(list(busy_ms), counts, (perf_counter() - sync) * 1e3)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss = sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
        print(f"epoch {epoch + 1}/5 | loss of the last window {loss:.3f} | counts {cadence.batch_counts}")
accuracy = (models[1](images).argmax(1) == labels).float().mean().item()
print(f"accuracy of either replica {accuracy:.3f}")
