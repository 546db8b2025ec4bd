"""Random loops on several devices do what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import nn
from torch.optim import Optimizer

from tests.numerics.random_loops import Action, Difference, Program, draw, play

SEEDS = 25


@pytest.fixture(autouse=True)
def lanes() -> str:
    """Plain CPU devices alone: what streams do has tests of its own."""
    return "cpu"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seeds(seed: int) -> None:
    play(draw(seed))


@contextmanager
def halving(module: nn.Module, _: Optimizer, __: Program) -> Iterator[nn.Module]:
    """A side that loses gradients."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    yield module


def test_a_wrong_gradient_is_found() -> None:
    forward = Action("forward", {"model": 0, "data": 1, "size": 4, "way": "own"})
    backward = Action("backward", {"which": 1, "retains": False, "syncs": True, "loss": "square"})
    program = Program(7, ("mlp",), "sgd", 2, None, (forward, backward))
    with pytest.raises(Difference, match=r"seed 7, action 2, backward(.|\n)*gradient of 0.weight of model 0"):
        play(program, halving)
