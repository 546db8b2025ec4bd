"""Handwritten digits: a loop of one's own, with parameter groups, a schedule and clipping."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import flowdp


def main(epochs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.Tensor(pixels) / 16, torch.tensor(labels))
    train, test = random_split(digits, [1500, 297])
    loader = DataLoader(train, batch_size=64, shuffle=True)
    test_images, test_targets = test[:]

    model: nn.Module = nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)
    )  # fmt: skip
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    model = flowdp.setup(model, optimizer, devices=["cpu", "cpu"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, epochs=epochs, steps_per_epoch=len(loader)
    )

    for epoch in range(1, epochs + 1):
        model.train()
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_targets).float().mean().item()
        print(f"epoch {epoch}: last loss {loss.item():.4f}, {right:.1%} of the test digits right")
    return model


if __name__ == "__main__":
    main()
