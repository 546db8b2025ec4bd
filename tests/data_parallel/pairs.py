"""Loops that run twice, by plain PyTorch and by `setup`, and must do the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

import flowdp

__all__ = [
    "Make",
    "Shares",
    "Side",
    "check",
    "draw",
    "everywhere",
    "mlp",
    "plain",
    "repeated",
    "same",
    "spread",
    "square",
    "train",
]

TOLERANCE = 1e-11

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Shares:
    """Number of devices, and their fixed shares if they have some."""

    devices: int
    ratios: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return f"{self.devices}" + ("" if self.ratios is None else " fixed")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `setup`."""
        return {"devices": ["cpu"] * self.devices, "partition_ratios": self.ratios, "progress": False}


CUT = (Shares(2), Shares(3, (2.0, 1.0, 1.0)))

everywhere = pytest.mark.parametrize("shares", CUT, ids=str)


@dataclass
class Side:
    """A model as a loop has it.

    Attributes:
        model: What the loop calls: the module, or the wrapper that `setup` returned.
        module: The module.
        optimizer: Its optimizer.
        seen: Gradients at each step.
    """

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer
    seen: list[dict[str, Tensor | None]] = field(default_factory=list)

    def step(self) -> None:
        """Note the gradients, step, zero them."""
        self.seen.append(self.gradients())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients, by the parameters' names."""
        found = {}
        for name, parameter in self.module.named_parameters():
            found[name] = None if parameter.grad is None else parameter.grad.detach().clone()
        return found

    def all(self) -> dict[str, Any]:
        """Everything that must be the same on both sides."""
        return {
            "gradients": [*self.seen, self.gradients()],
            "parameters": dict(self.module.named_parameters()),
            "buffers": dict(self.module.named_buffers()),
        }


def mlp() -> nn.Module:
    """6 - 8 - 3."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def draw(samples: int = 8, *more: int, seed: int = 0) -> Tensor:
    """The same random numbers each time. Shape [samples, *more], by default [samples, 6]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *(more or (6,)), generator=generator, dtype=torch.float64)


def repeated(way: Callable[[Side], Any]) -> Callable[[Side], list[Any]]:
    """A loop of three steps, each behind the same calls and backwards."""

    def loop(side: Side) -> list[Any]:
        seen = []
        for _ in range(3):
            seen.append(way(side))
            side.step()
        return seen

    return loop


def square(y: Tensor) -> Tensor:
    """A loss. Shape []."""
    return y.square().mean()


def train(side: Side, steps: int = 6) -> list[Tensor]:
    """Train some steps; returns the outputs."""
    seen = []
    for step in range(steps):
        y = side.model(draw(seed=step))
        seen.append(y)
        (square(y) + y.mean()).backward()
        side.step()
    return seen


def _made(make: Make, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    """The model of `make`, with the same numbers each time."""
    # Two are made, for a copy of a model whose attributes are functions has the functions of the first.
    torch.manual_seed(0)
    module = make().to(dtype)
    return module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def plain(make: Make, dtype: torch.dtype = torch.float64) -> Side:
    """The side without flowdp."""
    module, optimizer = _made(make, dtype)
    return Side(module, module, optimizer)


@contextmanager
def spread(
    make: Make, shares: Shares, *, dtype: torch.dtype = torch.float64, **options: Any
) -> Iterator[Side]:
    """The side of `setup`."""
    module, optimizer = _made(make, dtype)
    with flowdp.setup(module, optimizer, **(shares.options | options)) as dp:
        yield Side(dp, module, optimizer)


def check(
    loop: Callable[..., Any],
    shares: Shares,
    *makes: Make,
    refused: str | None = None,
    atol: float = TOLERANCE,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """Compare a loop on several devices with plain PyTorch.

    Args:
        loop: Gets a side for each model; what it returns is compared, and each side's gradients, parameters
            and buffers.
        shares: Devices.
        makes: Factories of the models.
        refused: Pattern of the FlowdpError that may be raised instead; None: no.
        atol: Largest difference.
        dtype: Of the parameters.
        options: Other arguments of `setup`.
    """
    expected = _run(loop, [plain(make, dtype) for make in makes])
    with ExitStack() as stack:
        sides = [stack.enter_context(spread(make, shares, dtype=dtype, **options)) for make in makes]
        try:
            found = _run(loop, sides)
        except flowdp.FlowdpError as error:
            if refused is None or not re.search(refused, str(error)):
                raise
            return
        same(found, expected, atol=atol)


def _run(loop: Callable[..., Any], sides: Sequence[Side]) -> dict[str, Any]:
    returned = loop(*sides)
    return {"returned": returned, **{f"model {number}": side.all() for number, side in enumerate(sides)}}


def same(found: Any, expected: Any, *, atol: float = TOLERANCE) -> None:
    """Fail where two trees of tensors differ."""
    (ours, shape), (theirs, other) = tree_flatten_with_path(found), tree_flatten_with_path(expected)
    assert shape == other
    for (path, value), (_, wanted) in zip(ours, theirs, strict=True):
        where = "".join(map(str, path))
        if isinstance(wanted, Tensor | float):
            assert isinstance(value, Tensor | float), f"{where}: {value}, not {wanted}"
            a, b = torch.as_tensor(value).detach(), torch.as_tensor(wanted).detach()
            try:
                torch.testing.assert_close(a, b, rtol=0, atol=atol)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
        else:
            assert value == wanted, where
