"""Two ways to run a script: on one device, as written, and with flowdp on several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flowdp

Weights = dict[str, Tensor]
Script = Callable[[Callable[..., Any]], Weights]
"""Trains a model, with `spread(model, optimizer, **options)` in place of flowdp.setup."""

Shares = tuple[float, ...]

MOVING = Path(__file__).resolve().parents[2] / "docs" / "moving.md"

SHARES: tuple[Shares, ...] = ((0.5, 0.5), (0.2, 0.3, 0.5))


def as_written(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    """The script without flowdp: its model stays as it is."""
    return model


@contextmanager
def spreading(shares: Shares) -> Iterator[Callable[..., Any]]:
    """flowdp.setup on CPU devices, closed after the script."""
    opened: list[flowdp.DataParallel] = []

    def spread(model: nn.Module, optimizer: Any = None, **options: Any) -> flowdp.DataParallel:
        opened.append(flowdp.setup(model, optimizer, devices=["cpu"] * len(shares), **options))
        return opened[-1]

    try:
        yield spread
    finally:
        for wrapped in opened:
            wrapped.close()


def _seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


def weights(*modules: nn.Module) -> Weights:
    """Copies of all parameters and buffers."""
    return {
        f"{place}.{name}": value.detach().clone()
        for place, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }


def assert_same(found: Weights, expected: Weights, atol: float = 1e-9) -> None:
    """Assert equality up to the order of summation.

    Args:
        found: Values of flowdp.
        expected: Values of one device.
        atol: Tolerance in float64; a model that computes its loss in float32 needs more.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(
                found[name], value, rtol=100 * atol, atol=atol, msg=partial("{}: {}".format, name)
            )
        else:
            assert torch.equal(found[name], value), name


def check(script: Script, shares: Shares, atol: float = 1e-9) -> None:
    """Run a script both ways from one seed, and compare the trained values."""
    _seed()
    expected = script(as_written)
    start = torch.get_rng_state()
    _seed()
    with spreading(shares) as spread:
        found = script(spread)
    assert torch.equal(torch.get_rng_state(), start), "the script drew other random numbers"
    assert_same(found, expected, atol)
    assert any(value.is_floating_point() and value.abs().sum() > 0 for value in expected.values())


def program(heading: str) -> str:
    """The first block of Python below a heading of docs/moving.md: a program as it stands there."""
    section = MOVING.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]
