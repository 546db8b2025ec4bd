"""A GAN in a loop of one's own: two models, two optimizers, each model on two devices.

The generator learns to put points where eight small clouds lie, on a circle around the origin.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import flowdp

CLOUDS, SPREAD, NOISE = 8, 0.05, 8


def main(steps: int = 1000) -> None:
    torch.manual_seed(0)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    optimizer_g, optimizer_d = adam(generator), adam(discriminator)
    with (
        flowdp.setup(generator, optimizer_g, devices=["cpu", "cpu"]) as parallel_g,
        flowdp.setup(discriminator, optimizer_d, devices=["cpu", "cpu"]) as parallel_d,
    ):
        for step in range(1, steps + 1):
            loss_g, loss_d = train(parallel_g, parallel_d, optimizer_g, optimizer_d, real(128))
            if step % (steps // 5) == 0:
                print(f"step {step}: loss {loss_g:.3f} and {loss_d:.3f}, {quality(parallel_g)}")


def train(
    generator: nn.Module,
    discriminator: nn.Module,
    optimizer_g: Optimizer,
    optimizer_d: Optimizer,
    points: Tensor,
) -> tuple[float, float]:
    """One step of each; nothing in it knows how many devices there are."""
    ones, zeros = torch.ones(len(points), 1), torch.zeros(len(points), 1)
    noise = torch.randn(len(points), NOISE)
    fakes = generator(noise)

    optimizer_d.zero_grad()
    loss_d = F.binary_cross_entropy_with_logits(discriminator(points), ones)
    loss_d = loss_d + F.binary_cross_entropy_with_logits(discriminator(fakes.detach()), zeros)
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = F.binary_cross_entropy_with_logits(discriminator(fakes), ones)  # through both models
    loss_g.backward()
    optimizer_g.step()
    return loss_g.item(), loss_d.item()


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )  # fmt: skip


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99))


def centres() -> Tensor:
    """Of the clouds [clouds, 2]."""
    angles = torch.arange(CLOUDS) * (2 * math.pi / CLOUDS)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def real(count: int) -> Tensor:
    """Points of the clouds [count, 2]."""
    return centres()[torch.randint(CLOUDS, (count,))] + SPREAD * torch.randn(count, 2)


@torch.no_grad()
def quality(generator: nn.Module) -> str:
    """How many of the generator's points lie in a cloud, and in how many clouds they lie."""
    distance, cloud = torch.cdist(generator(torch.randn(1000, NOISE)), centres()).min(dim=1)
    inside = cloud[distance < 4 * SPREAD]
    return f"{len(inside) / 1000:.0%} of the points lie in clouds, in {len(inside.unique())} of {CLOUDS}"


if __name__ == "__main__":
    main()
