"""Loops as people write them, on several devices: as by plain PyTorch, or refused by an error that names why.

Here: buffers, and other weights for a call. Beside it: `test_pattern_state.py`, what a
model keeps and where forward runs; `test_pattern_graphs.py`, what loops do with graphs; and
`test_pattern_hooks.py`, what watches a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.data_parallel.pairs import (
    TOLERANCE,
    Make,
    Shares,
    Side,
    check,
    draw,
    everywhere,
    mlp,
    spread,
    square,
)


# ---------------------------------------------------------------- buffers that a graph has saved
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("std", torch.rand(4) + 1)
        self.std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.std


class Rope(nn.Module):
    """Rotary positions from a cache that forward makes anew for a longer sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.register_buffer("cos", torch.zeros(0, 4), persistent=False)
        self.register_buffer("sin", torch.zeros(0, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        if len(self.cos) < steps:
            angles = torch.arange(steps, dtype=x.dtype)[:, None] / torch.arange(1, 5, dtype=x.dtype)
            self.cos, self.sin = angles.cos(), angles.sin()
        y = self.layer(x[..., None])
        turned = torch.cat([-y[..., 2:], y[..., :2]], -1)
        return y * self.cos[:steps] + turned * self.sin[:steps]


class Overlapping(nn.Module):
    """Two buffers in one memory, and one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("table", torch.rand(2, 4))
        self.register_buffer("row", self.table[1])
        self.register_buffer("same", self.table)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.row + self.layer(x).sin() * self.same[0]


class Normed(nn.Sequential):
    """BatchNorm in evaluation, with running statistics that say something."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        norm = self[1]
        norm.running_mean, norm.running_var = torch.rand(4), torch.rand(4) + 0.5


BUFFERED = [Scaled, Rope, Overlapping, Normed]


def in_mode(side: Side) -> None:
    side.model.train(not isinstance(side.module, Normed))


def two_calls(side: Side) -> None:
    in_mode(side)
    for step in range(3):
        a, b = draw(seed=step), draw(6, seed=step + 9)
        (square(side.model(a)) + side.model(b).abs().mean()).backward()
        side.step()


def evaluation_between(side: Side) -> Tensor:
    in_mode(side)
    for step in range(3):
        y = side.model(draw(seed=step))
        side.model.eval()
        with torch.no_grad():
            side.model(draw(5, seed=step + 7))
        with torch.inference_mode():
            seen = side.model(draw(5, seed=step + 8))
        in_mode(side)
        square(y).backward()
        side.step()
    return seen.clone()


@pytest.mark.parametrize(
    ("buffers", "loop"), [("broadcast", two_calls), ("average", evaluation_between)], ids=["", "average"]
)
@pytest.mark.parametrize("make", BUFFERED)
@everywhere
def test_buffers_that_a_graph_has_saved(
    make: Make, loop: Callable[[Side], Any], shares: Shares, buffers: str
) -> None:
    check(loop, shares, make, buffers=buffers)


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
@everywhere
def test_two_calls_of_batch_norm_in_training(shares: Shares, buffers: str) -> None:
    """The parts are normalised by themselves, so there is nothing to compare with."""
    with spread(Normed, shares, buffers=buffers) as side:
        for step in range(3):
            (square(side.model(draw(12, seed=step))) + side.model(draw(12, seed=step + 5)).sum()).backward()
            side.step()
        norm: Any = side.module[1]  # type: ignore[index]
        assert norm.num_batches_tracked == 6
        assert norm.running_var.isfinite().all()
        side.model.eval()
        torch.testing.assert_close(side.model(draw()), side.module(draw()), rtol=0, atol=TOLERANCE)


@everywhere
def test_a_buffer_that_the_loop_replaces_between_two_calls(shares: Shares) -> None:
    def loop(side: Side) -> None:
        for step in range(4):
            module: Any = side.module
            first = side.model(draw(seed=step))
            module.std = module.std * 1.5
            (square(first) + square(side.model(draw(seed=step + 5)))).backward()
            side.step()

    check(loop, shares, Scaled)


class Counting(nn.Module):
    """A forward that writes to a buffer: in place, or with a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.layer = nn.Linear(6, 4)
        self.register_buffer("steps", torch.ones(()))
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.in_place:
                self.steps += 1
            else:
                self.steps = self.steps + 1
        return self.layer(x) * (1 / self.steps)


@pytest.mark.parametrize("in_place", [True, False])
@everywhere
def test_a_buffer_that_counts_calls(shares: Shares, in_place: bool) -> None:
    """Each device counts the same, and a buffer that forward writes to is not one that a graph has saved."""

    def loop(side: Side) -> Tensor:
        for step in range(3):
            square(side.model(draw(seed=step))).backward()
            first = side.model(draw(seed=step + 3))
            side.model.eval()
            with torch.no_grad():
                side.model(draw(seed=step + 6))
            side.model.train()
            square(first).backward()
            side.step()
        return side.module.get_buffer("steps")

    check(loop, shares, functools.partial(Counting, in_place))


# ---------------------------------------------------------------- other weights
def averaged(side: Side, factor: float = 0.5) -> dict[str, Tensor]:
    return {name: p.detach() * factor for name, p in side.module.named_parameters()}


@everywhere
def test_functional_call_with_other_buffers(shares: Shares) -> None:
    def loop(side: Side) -> list[Tensor]:
        seen = []
        for step in range(3):
            y = side.model(draw(seed=step))
            other = {"std": torch.full((4,), 7.0, dtype=torch.float64)}
            seen.append(functional_call(side.model, other, (draw(seed=step),)))
            square(y).backward()
            side.step()
        return seen

    check(loop, shares, Scaled)


@everywhere
def test_torch_func_around_functional_call(shares: Shares) -> None:
    """The transforms of torch.func look into the thread of the caller."""

    def loop(side: Side) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return square(functional_call(side.model, weights, (draw(),)))

        return torch.func.grad(loss)(averaged(side))

    check(loop, shares, mlp, refused=r"torch\.func|module")
